"""The workload: templates with an exact number of shared tokens, ever new variants of them, Zipf popularity.

Knows texts and a tokenizer. Knows nothing of servers and measures nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from string import Template

from tokenizers import Tokenizer

from kvreuse.engine.demo_model import demo_model_path
from kvreuse.errors import ConfigError

__all__ = ["Workload", "fit", "load_tokenizer"]

_TEXTS = Path(__file__).parent / "texts"
_CASES = "=== cases\n"
_PREFIX_TAIL, _PROMPT_TAIL = "\n\nMessage:", "\nAnswer:"
_WORDS: dict[str, Sequence[object]] = {
    "company": ("Halden & Rowe", "Northbeck", "Tulip Harbour", "Carrow", "Ostrava Works", "Lindqvist"),
    "region": ("Norway", "Flanders", "Bavaria", "Galicia", "Tuscany", "Jutland"),
    "team": ("first desk", "evening team", "harbour office", "blue team", "quality group", "night shift"),
    "name": ("Ada Brook", "Jonas Weil", "Mira Castel", "Pavel Horn", "Ines Okoro", "Tom Aldry", "Lea Sund"),
    "place": ("Bergen", "Ghent", "Passau", "Vigo", "Lucca", "Ribe", "Tartu", "Graz", "Leeds", "Porto", "Brno"),
    "number": range(100_000, 1_000_000),
    "day": range(10, 29),
}


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of `model`: demo, or a folder that holds tokenizer.json. Raises ConfigError."""
    folder = demo_model_path() if model == "demo" else Path(model)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer.json in {folder}\nhint: --tokenizer names a folder that has one")
    return Tokenizer.from_file(str(file))


def fit(tokenizer: Tokenizer, text: str, *, num_tokens: int, head: str = "", tail: str = "") -> str:
    """`head`, as much of `text` as fits, and `tail`: together exactly `num_tokens` tokens, special ones included.

    Raises ConfigError when head and tail alone are longer, or the text is too short.
    """
    offsets = tokenizer.encode(head + text).offsets
    for last in range(min(len(offsets), num_tokens) - 1, -1, -1):
        end = offsets[last][1]
        if end < len(head):
            break
        kept = (head + text)[:end].rstrip()
        num_missing = num_tokens - len(tokenizer.encode(kept + tail).ids)
        # A cut inside a word changes how its rest is spelled, so that the count may skip a number: then fill up.
        fitted = kept + " so" * num_missing + tail
        if num_missing == 0 or (num_missing > 0 and len(tokenizer.encode(fitted).ids) == num_tokens):
            return fitted
    raise ConfigError(f"no prompt of exactly {num_tokens} tokens can be made of these texts")


class Workload:
    """Deterministic: the same settings give the same prompts in the same order.

    marker: put before every template, so that a server that is still running has not seen any of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prefix_tokens: int, own_tokens: int, seed: int = 0, marker: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix_tokens = prefix_tokens
        self._own_tokens = own_tokens
        self._seed = seed
        self._marker = marker
        self._random = random.Random(seed)
        self._sources = [path.read_text(encoding="utf-8") for path in sorted(_TEXTS.glob("*.txt"))]
        self._prefixes: dict[int, str] = {}
        self._num_variants: Counter[int] = Counter()

    def prefix(self, template: int) -> str:
        """What all variants of a template begin with. Templates beyond the texts are further editions of them."""
        if template not in self._prefixes:
            chance = random.Random(f"{self._seed}/{template}")
            text = f"{self._marker}Edition {template + 1}. "
            for number in count(template):
                text += _filled(self._sources[number % len(self._sources)].partition(_CASES)[0], chance)
                if len(self._tokenizer.encode(text).ids) > self._prefix_tokens:
                    break
            self._prefixes[template] = fit(self._tokenizer, text, num_tokens=self._prefix_tokens, tail=_PREFIX_TAIL)
        return self._prefixes[template]

    def variant(self, template: int) -> str:
        """The next variant that nobody has seen: it differs from all others right behind the prefix."""
        self._num_variants[template] += 1
        number = self._num_variants[template]
        chance = random.Random(f"{self._seed}/{template}/{number}")
        cases = self._sources[template % len(self._sources)].partition(_CASES)[2].splitlines()
        text = f" {number}."
        while len(self._tokenizer.encode(text).ids) < self._own_tokens:
            text += "".join(" " + _filled(case, chance) for case in chance.sample(cases, len(cases)))
        num_tokens = self._prefix_tokens + self._own_tokens
        return fit(self._tokenizer, text, num_tokens=num_tokens, head=self.prefix(template), tail=_PROMPT_TAIL)

    def draw(self, num_prompts: int, *, num_templates: int) -> list[str]:
        """New variants of templates 0 to num_templates - 1, the template of rank r with probability ~ 1 / (r + 1)."""
        weights = [1 / (rank + 1) for rank in range(num_templates)]
        return [self.variant(t) for t in self._random.choices(range(num_templates), weights, k=num_prompts)]


def _filled(text: str, chance: random.Random) -> str:
    return Template(text).substitute({name: chance.choice(words) for name, words in _WORDS.items()})
