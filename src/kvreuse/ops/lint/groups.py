"""Groups near-duplicates: bottom-k sketches of word shingles (Broder 1997), each prompt joined to the nearest group.

Knows words. Knows nothing of tokens or of what sets the members apart.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["group_similar", "sketch"]

SKETCH_SIZE = 128
_SHINGLE = 3
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")


def sketch(text: str) -> frozenset[int]:
    """The SKETCH_SIZE smallest hashes of the text's shingles. Numbers count as alike, case and spaces do not count."""
    words = [_DIGITS.sub("0", word) for word in _WORD.findall(text.lower())]
    shingles = {
        " ".join(words[i : i + _SHINGLE]).encode("utf-8", "surrogatepass")
        for i in range(max(1, len(words) - _SHINGLE + 1))
    }
    return frozenset(sorted(xxh3_64_intdigest(shingle) for shingle in shingles)[:SKETCH_SIZE])


def similarity(one: frozenset[int], other: frozenset[int]) -> float:
    """Estimate of shared / all shingles of two texts, exact for texts of at most SKETCH_SIZE shingles together."""
    smallest = sorted(one | other)[:SKETCH_SIZE]
    return sum(value in one and value in other for value in smallest) / max(1, len(smallest))


def group_similar(texts: Sequence[str], *, threshold: float) -> list[list[int]]:
    """Indices of texts whose similarity to the first of their group is at least `threshold`; groups of two and more."""
    groups: list[list[int]] = []
    leaders: list[frozenset[int]] = []
    index: defaultdict[int, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        mine = sketch(text)
        votes = Counter(group for value in mine for group in index.get(value, ()))
        best = max(
            (group for group, _ in votes.most_common(4)), key=lambda group: similarity(mine, leaders[group]), default=-1
        )
        if best >= 0 and similarity(mine, leaders[best]) >= threshold:
            groups[best].append(number)
            continue
        for value in mine:
            index[value].append(len(groups))
        groups.append([number])
        leaders.append(mine)
    return [group for group in groups if len(group) > 1]
