"""Text to token ids and back, safe to call from many threads.

Knows one Transformers tokenizer and its chat template. Knows nothing of requests, models or streams.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jinja2.exceptions import TemplateError

from kvreuse.errors import RequestError

__all__ = ["Tokenizer"]

# What templates raise over messages of a shape that their author did not think of.
RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Tokenizer:
    """Wraps `hf`, a Transformers tokenizer, which nobody else may change afterwards."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self._lock: AbstractContextManager[Any] = threading.Lock()
        if hf.is_fast:
            # With neither set, encoding never changes the shared backend, so it needs no lock.
            hf.backend_tokenizer.no_truncation()
            hf.backend_tokenizer.no_padding()
            self._lock = nullcontext()
        added_special = {token_id for token_id, token in hf.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(added_special | set(hf.all_special_ids))
        self._byte_ids = self._find_byte_ids()
        self._anchor_ids = list(self.encode("a", add_special_tokens=False))
        self._anchor_text = self.decode(self._anchor_ids, skip_special_tokens=False)
        self._reserved_variables = frozenset(inspect.signature(hf.apply_chat_template).parameters)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added ones included; the model's may be larger."""
        return len(self.hf)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are spelled with tokens like <0xE2>."""
        return bool(self._byte_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "inputs") -> tuple[int, ...]:
        """Token ids of `text`. A BOS that the text already spells out is not added again.

        Raises RequestError (`param`) when the text cannot be UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text holds half of a surrogate pair, which is no character", param=param) from None
        with self._lock:
            encoded = self.hf(text, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
        token_ids = tuple(encoded["input_ids"])
        bos = self.hf.bos_token_id
        if add_special_tokens and token_ids[:2] == (bos, bos) and text.startswith(self.hf.bos_token):
            return token_ids[1:]
        return token_ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant is to speak.

        variables: further names for the template, such as `date_string`.
        Raises RequestError: `messages` when there is no template or it refuses them, `variables` for a reserved name.
        """
        if not self.hf.chat_template:
            raise RequestError("this model has no chat template: send `inputs` instead", param="messages")
        reserved = sorted(self._reserved_variables.intersection(variables or ()))
        if reserved:
            raise RequestError(f"the template variable {reserved[0]!r} is reserved", param="variables")
        if not messages:
            raise RequestError("at least one message is needed", param="messages")
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
                **(variables or {}),
            )
        except RENDER_ERRORS as error:
            # Only what the template's author raised on purpose was written for the caller's eyes.
            reason = f": {str(error)[:200]}" if type(error) is TemplateError else ""
            raise RequestError(f"the chat template refuses these messages{reason}", param="messages") from error
        # The template spells every special token, BOS included.
        return self.encode(text, add_special_tokens=False, param="messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, exactly as the vocabulary spells it.

        Ids without a token are skipped; bytes that are no UTF-8 become U+FFFD.
        """
        with self._lock:
            text = self.hf.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """How one token reads in the middle of a text, its leading space and special tokens included."""
        text = self.decode([*self._anchor_ids, token_id], skip_special_tokens=False)
        return text.removeprefix(self._anchor_text)

    def is_visible(self, token_id: int) -> bool:
        """Whether `decode` looks at it: it has a token and that is not special."""
        return token_id not in self._special_ids and self.hf.convert_ids_to_tokens(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte, so that its text depends on the bytes around it."""
        return token_id in self._byte_ids

    def _find_byte_ids(self) -> frozenset[int]:
        known = self.hf.get_vocab()
        letter = known.get("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        return frozenset(known[name] for name in names if name in known)
