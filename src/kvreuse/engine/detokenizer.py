"""Token ids of one answer, one at a time, to text that is safe to show.

Knows when text may still change (half a character, the beginning of a stop string). Knows nothing of requests,
models or how text is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvreuse.engine.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHAR_TOKENS = 4  # UTF-8 spells a character with at most four bytes, and a token has at least one


class Detokenizer:
    """The parts that `push` and `flush` return join to `tokenizer.decode(all ids)`, cut at the first stop string.

    stop: of several, the one that is complete first wins, of those the longest. Empty ones are ignored.
    prompt_ids: when the answer continues visible text of the prompt, its first word keeps its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        self.stopped = False  # a stop string is complete: nothing more comes out
        self._tokenizer = tokenizer
        self._stops = [text for text in stop if text]
        self._held = ""  # text that may turn out to begin a stop string
        # The end of the answer that may still matter, with at least one id before whatever is unfinished, and how many
        # characters of its text are out. A character that the prompt leaves half done is not out yet.
        self._ids: list[int] = _visible_tail(tokenizer, prompt_ids)
        self._num_shown = len(tokenizer.decode(self._ids).removesuffix(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now, often none."""
        if self.stopped or not self._tokenizer.is_visible(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            # One wrong byte spoils its whole run, so nothing of a run is certain before its end.
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT) and not self._tokenizer.has_byte_fallback:
            return self._show_unfinished(text)
        return self._show(text)

    def flush(self) -> str:
        """The answer is over: return all that was held back."""
        if self.stopped:
            return ""
        return self._show(self._tokenizer.decode(self._ids)) + self._held

    def _show(self, text: str) -> str:
        """`text` is that of all `_ids`, and they end between two characters."""
        new_text = text[self._num_shown :]
        if new_text:
            # One id that shows is context enough: whether a space leads the next one depends on nothing else.
            self._ids = self._ids[-1:]
            self._num_shown = len(self._tokenizer.decode(self._ids))
        return self._cut_at_stop(new_text)

    def _show_unfinished(self, text: str) -> str:
        """Only the last character may still change."""
        new_text = text[self._num_shown : -1]
        self._num_shown = len(text) - 1
        if len(self._ids) > 2 * MAX_CHAR_TOKENS:
            self._ids = self._ids[self._clean_split(text) - 1 :]
            self._num_shown = len(self._tokenizer.decode(self._ids)) - 1
        return self._cut_at_stop(new_text)

    def _clean_split(self, text: str) -> int:
        """The last place in `_ids` that lies between two characters."""
        num_ids, decode = len(self._ids), self._tokenizer.decode
        for split in range(num_ids - 1, num_ids - 1 - MAX_CHAR_TOKENS, -1):
            if decode(self._ids[:split]) + decode(self._ids[split:]) == text:
                return split
        # Not a byte-level vocabulary: there a character never spans two tokens.
        return num_ids - 1

    def _cut_at_stop(self, new_text: str) -> str:
        """What is certain not to be part of a stop string. Where one is complete, `stopped` is set."""
        text = self._held + new_text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        begins = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self._stops))
        num_safe = next(begins, len(text))
        self._held = text[num_safe:]
        return text[:num_safe]


def _visible_tail(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last ids of the prompt that show; none when it ends in a special token, which begins a new text."""
    tail: list[int] = []
    for token_id in reversed(prompt_ids):
        is_enough = len(tail) >= MAX_CHAR_TOKENS and not tokenizer.is_byte(token_id)
        if is_enough or not tokenizer.is_visible(token_id):
            break
        tail.insert(0, token_id)
    return tail
