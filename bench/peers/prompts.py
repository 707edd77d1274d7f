"""The workload: templates of several lengths with Zipf popularity, and prompts that share nothing.

Knows texts and tokens. Knows nothing of servers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvreuse.ops.bench.workload import Workload, fit

__all__ = ["Load", "PeerPrompt", "templated", "unrelated"]

PREFIX_TOKENS = (1024, 512, 2048)  # of the most popular template, the second, the third, and so on in turn
OWN_TOKENS = (16, 48)
_TAIL = "\nAnswer:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """num_requests: concurrency -> requests of a run. The same prompts in the same order, as many as are wanted."""

    num_templates: int
    prefix_tokens: tuple[int, ...]
    max_tokens: int
    num_requests: dict[int, int]
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerPrompt:
    """is_first: nobody before it, in the order of the workload, has the same template."""

    text: str
    template: int
    is_first: bool


def templated(load: Load, tokenizer: Tokenizer) -> list[PeerPrompt]:
    """As many prompts as the longest run needs, of the template of rank r with probability ~ 1 / (r + 1)."""
    chance = random.Random(load.seed)
    weights = [1 / (rank + 1) for rank in range(load.num_templates)]
    drawn = chance.choices(range(load.num_templates), weights, k=max(load.num_requests.values()))
    workloads = {
        length: Workload(tokenizer, prefix_tokens=length, own_tokens=OWN_TOKENS[1], seed=load.seed)
        for length in load.prefix_tokens
    }
    prompts: list[PeerPrompt] = []
    for template in drawn:
        length = load.prefix_tokens[template % len(load.prefix_tokens)]
        text = _shortened(workloads[length], template, num_tokens=length + chance.randint(*OWN_TOKENS), with_=tokenizer)
        is_first = all(prompt.template != template for prompt in prompts)
        prompts.append(PeerPrompt(text=text, template=template, is_first=is_first))
    return prompts


def unrelated(tokenizer: Tokenizer, *, num_tokens: int, count: int) -> list[str]:
    """Prompts that differ from the first word on, from each other and from every template."""
    words = ["Amber", "Birch", "Cedar", "Dune", "Ember", "Fjord", "Grove", "Heath"]
    texts = []
    for number in range(count):
        marker = f"{words[number % len(words)]} {number}. "
        workload = Workload(tokenizer, prefix_tokens=num_tokens - 32, own_tokens=32, seed=1000 + number, marker=marker)
        texts.append(workload.variant(number))
    return texts


def _shortened(workload: Workload, template: int, *, num_tokens: int, with_: Tokenizer) -> str:
    prefix = workload.prefix(template)
    own = workload.variant(template).removeprefix(prefix).removesuffix(_TAIL)
    return fit(with_, own, num_tokens=num_tokens, head=prefix, tail=_TAIL)
