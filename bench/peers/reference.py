"""What plain Transformers answers in float32, greedily: the texts that everybody's are compared with.

Knows texts and a file that keeps them. Knows nothing of peers but the plain one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.roster import FOLDER, MODEL

__all__ = ["agrees", "references"]

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
    prompts: Sequence[str], *, max_tokens: int, compute: Callable[[Sequence[str]], list[str]], folder: Path = FOLDER
) -> list[str]:
    """The texts for `prompts`. What the file has not yet is computed, which takes seconds each, and kept."""
    file = folder / "reference.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    model = _digest(MODEL / "model.safetensors")
    keys = [hashlib.sha256(f"{model}/{max_tokens}/{prompt}".encode()).hexdigest() for prompt in prompts]
    missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in known}
    if missing:
        known |= zip(missing, compute(list(missing.values())), strict=True)
        file.write_text(json.dumps(known, indent=0))
    return [known[key] for key in keys]


def _digest(file: Path) -> str:
    with file.open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()
