"""What plain Transformers answers in float32, greedily: the texts that everybody's are compared with.

Knows texts and a file that keeps them. Knows nothing of peers but the plain one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["agrees", "digest", "references"]

_SPECIAL = re.compile(r"<\|\w+\|>")
_END = "<|im_end|>"


def agrees(text: str, reference: str) -> bool:
    """Whether an answer is the same up to the end token, beyond which peers differ in what ignoring it means.

    Special tokens do not count: some peers write them, others do not.
    """
    expected, end, _ = reference.partition(_END)
    expected, text = (_SPECIAL.sub("", part).strip() for part in (expected, text))
    return text.startswith(expected) if end else text == expected


def references(
    prompts: Sequence[str], *, model: str, max_tokens: int, compute: Callable[[list[str]], Iterable[str]], file: Path
) -> list[str]:
    """The texts for `prompts`. What `file` has not yet is computed, which takes seconds each, and kept there at once.

    model: whatever the texts depend on beside the prompt and their length.
    """
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    keys = [hashlib.sha256(f"{model}/{max_tokens}/{prompt}".encode()).hexdigest() for prompt in prompts]
    missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in known}
    for key, text in zip(missing, compute(list(missing.values())) if missing else (), strict=True):
        known[key] = text
        file.write_text(json.dumps(known, indent=0))
    return [known[key] for key in keys]


def digest(file: Path) -> str:
    """Of all its bytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
