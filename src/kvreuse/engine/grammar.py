"""Answers that must be JSON: a schema becomes, step by step, the tokens that may come next.

Knows schemas, token ids and the grammar library. Knows nothing of logits, requests or scheduling.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvreuse.engine.tokenizer import Tokenizer
from kvreuse.errors import RequestError
from kvreuse.types import MakeMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammars"]

_PARAM = "response_format"
_MAX_REASON = 300
# Small models fall into endless white space where any amount is allowed.
_OPTIONS: Any = {"whitespace_pattern": r"[ \n]{0,16}"}


class Grammars:
    """Compiles JSON schemas for one tokenizer. Thread-safe; the first call takes some tenths of a second."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._ready: LLTokenizer | None = None

    def compile(self, json_schema: Mapping[str, object]) -> MakeMask:
        """Makes the mask of one answer from the live list of its token ids, the prompt's included.

        A mask is bool [vocab_size] and follows the list whenever it is called. When the answer is complete (or the
        library gives up) it allows only the end of sequence. Raises RequestError 400: the schema is not supported, or
        the library is not installed.
        """
        with self._lock:
            self._ready = self._ready or self._load()
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(json_schema), defaults=_OPTIONS)
        matcher = LLMatcher(self._ready, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the JSON schema cannot be used: {matcher.get_error()[:_MAX_REASON]}", param=_PARAM)
        return lambda token_ids: self._follow(matcher.deep_copy(), token_ids)

    def _follow(self, matcher: LLMatcher, token_ids: Sequence[int]) -> Callable[[], Tensor]:
        num_read = len(token_ids)

        def mask() -> Tensor:
            nonlocal num_read
            matcher.consume_tokens(list(token_ids[num_read:]))
            num_read = len(token_ids)
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
            return allowed[: self._vocab_size].bool()

        return mask

    def _load(self) -> LLTokenizer:
        if not self._tokenizer.hf.is_fast or not self._eos_token_ids:
            raise RequestError("response_format needs a fast tokenizer with an end of sequence", param=_PARAM)
        try:
            from llguidance import LLTokenizer
        except ImportError:
            hint = "pip install 'kvreuse[grammar]'"
            raise RequestError(f"response_format is not installed here; hint: {hint}", param=_PARAM) from None
        num_tokens = max(self._vocab_size, self._tokenizer.vocab_size)
        vocabulary = self._tokenizer.hf.backend_tokenizer.to_str()
        return LLTokenizer(vocabulary, n_vocab=num_tokens, eos_token=self._eos_token_ids)
