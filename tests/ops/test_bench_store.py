"""`kvreuse bench store`: what it fills, what it counts, and what it says about growth."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvreuse.cache.hashing import block_hashes
from kvreuse.cache.tree import NUM_BUCKETS
from kvreuse.cli.main import main
from kvreuse.ops.bench import store
from kvreuse.ops.bench.numbers import at_least, many
from kvreuse.types import Scope

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PROMPTS_PER_THREAD", 20)


def figures_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Whether a store so small grows dearer is chance; the exit code must say the same as the figures."""
    code = main(["bench", "store", "--entries=512,128", "--threads=3", *flags, "--json", "-"])
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == any(figures[f"{kind}_growth"] > 1.5 for kind in ("match", "commit", "evict"))
    return figures


def test_every_size_is_measured_the_smallest_first(capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capsys)
    assert [point["entries"] for point in figures["points"]] == [128, 512]
    assert all(point[f"{kind}_us"] > 0 for point in figures["points"] for kind in ("match", "commit", "evict"))
    assert {(row["kind"], row["buckets"]) for row in figures["threads"]} == {
        (kind, buckets) for kind in ("match", "commit") for buckets in ("equal", "disjoint")
    }
    assert figures["settings"] == {"entries": [128, 512], "prompt_blocks": 1, "threads": 3}


def test_every_figure_is_documented_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text("utf-8").partition("## kvreuse bench store\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(figures_of(capsys)) == sorted(re.findall(r"`(\w+)`", "".join(rows)))


@pytest.mark.parametrize("prompt_blocks", [1, 4])
def test_rounds_of_storing_fill_the_store_and_rounds_of_evicting_keep_it_full(prompt_blocks: int) -> None:
    made = store._Store(160, prompt_blocks)
    for kind, num_evicted in (("match", 0), ("commit", 0), ("evict", made._chunk * prompt_blocks)):
        before = made._cache.usage()
        for _ in range(store._ROUNDS):
            made.measure(kind)
        after = made._cache.usage()
        assert after.num_evicted_blocks - before.num_evicted_blocks == store._ROUNDS * num_evicted
    assert after.num_blocks == 160
    assert after.hit_tokens == store._ROUNDS * made._chunk * prompt_blocks * store._BLOCK
    made._cache.check_integrity()


@pytest.mark.parametrize("buckets", [{0}, {5, 13}])
def test_prompts_for_threads_are_filed_where_they_are_wanted(buckets: set[int]) -> None:
    prompts = store._prompts_in(buckets, start=0)
    hashes = [block_hashes(prompt, scope=Scope(), block_size=store._BLOCK) for prompt in prompts]
    assert {names[0][0] % NUM_BUCKETS for names in hashes} == buckets
    assert len({names[0] for names in hashes}) == 20


def test_more_threads_than_buckets_still_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    rows = store._with_threads(NUM_BUCKETS + 1, is_equal=False)
    assert all(row["threads_ops_per_s"] for row in rows)


@pytest.mark.parametrize(
    ("evict_us", "fault"), [(15.0, None), (15.2, "the cost of a block grows with the store: evict")]
)
def test_growth_beyond_half_is_a_fault(evict_us: float, fault: str | None) -> None:
    flags = argparse.Namespace(entries=[1, 2], prompt_blocks=1, threads=2)
    point = {"entries": 1, "match_us": 1.0, "commit_us": 2.0, "evict_us": 10.0, "bytes_per_block": 9}
    report = store._report(flags, [point, {**point, "evict_us": evict_us}], [])
    assert (report.fault or "").startswith(fault or "") and (report.fault is None) == (fault is None)


def test_a_list_of_numbers_is_sorted_and_each_is_checked() -> None:
    assert many(at_least(2))("8,2,8") == [2, 8]
    with pytest.raises(argparse.ArgumentTypeError, match="1 is not an integer from 2"):
        many(at_least(2))("4,1")
