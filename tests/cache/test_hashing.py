"""Names of blocks are stable, chained, wide, and no two scopes share one."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.cache.hashing import BlockHasher, block_hashes, encode_scope
from kvreuse.types import Scope

SRC = Path(__file__).parents[2] / "src"
GOLDEN = ["e930c9dfd96017cfa11408f260c7ef06", "9500283d705e53ed0f8ed39b256fbd34"]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_a_fresh_process_with_another_hash_seed_gives_the_same_names(seed: str) -> None:
    code = (
        "from kvreuse.cache.hashing import block_hashes; from kvreuse.types import Scope\n"
        "print([h.hex() for h in block_hashes(range(64), scope=Scope(model='m', tenant='t'), block_size=32)])"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": seed}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    here = block_hashes(range(64), scope=Scope(model="m", tenant="t"), block_size=32)
    assert out.strip() == str([h.hex() for h in here])


def test_names_written_by_an_earlier_release_still_match() -> None:
    names = block_hashes([1, 2, 3, 4, 5], scope=Scope(model="m", adapter="a", tenant="t"), block_size=2)
    assert [name.hex() for name in names] == GOLDEN


def test_a_name_has_128_bits() -> None:
    assert {len(name) for name in block_hashes(range(100), scope=Scope(), block_size=4)} == {16}


@given(TOKENS, st.integers(1, 8))
def test_only_whole_blocks_are_named(token_ids: list[int], block_size: int) -> None:
    assert len(block_hashes(token_ids, scope=Scope(), block_size=block_size)) == len(token_ids) // block_size


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_a_changed_token_changes_its_block_and_all_after_it_only(token_ids: list[int], at: int) -> None:
    changed = [*token_ids[:at], token_ids[at] + 1, *token_ids[at + 1 :]]
    left = block_hashes(token_ids, scope=Scope(), block_size=2)
    right = block_hashes(changed, scope=Scope(), block_size=2)
    assert [a == b for a, b in zip(left, right, strict=True)] == [i < at // 2 for i in range(4)]


@given(TOKENS, st.lists(st.integers(0, 40), max_size=5))
def test_the_incremental_hasher_gives_the_same_names(token_ids: list[int], cuts: list[int]) -> None:
    scope, hasher = Scope(tenant="t"), BlockHasher(scope=Scope(tenant="t"), block_size=3)
    bounds = [0, *sorted(cuts), len(token_ids)]
    for begin, end in pairwise(bounds):
        hasher.extend(token_ids[begin:end])
    assert hasher.hashes == block_hashes(token_ids, scope=scope, block_size=3)


@given(st.tuples(*[st.text(max_size=6)] * 3), st.tuples(*[st.text(max_size=6)] * 3))
def test_two_scopes_never_encode_alike(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    scopes = [Scope(model=m, adapter=a, tenant=t) for m, a, t in (left, right)]
    assert (encode_scope(scopes[0]) == encode_scope(scopes[1])) == (left == right)


def test_parts_that_move_between_fields_give_other_names() -> None:
    parts = [("x", "", ""), ("xy", "z", ""), ("x", "yz", ""), ("1:a", "b", "c"), ("a", "1:b", "c")]
    scopes = {Scope(model=m, adapter=a, tenant=t) for part in parts for m, a, t in permutations(part)}
    names = {block_hashes([1, 2], scope=scope, block_size=2)[0] for scope in scopes}
    assert len(names) == len(scopes)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([token_id], scope=Scope(), block_size=1)
