"""`kvreuse bench policy`: small traces whose hit rates are known by hand, through the real cache."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvreuse.cli.main import main
from kvreuse.config import Config
from kvreuse.ops.bench.policy import ceiling, replay
from kvreuse.ops.trace import Trace, read_trace

BLOCK = 64
Row = dict[str, Any]


def row(at_s: float, *names: int, extra: int = 1) -> Row:
    """A prompt of whole blocks and `extra` tokens."""
    num_tokens = len(names) * BLOCK + extra
    return {"timestamp": at_s * 1000, "input_length": num_tokens, "output_length": 1, "hash_ids": [*names]}


def written(path: Path, rows: list[Row], *, is_packed: bool = False) -> str:
    text = "".join(json.dumps(entry) + "\n" for entry in rows).encode()
    path.write_bytes(gzip.compress(text) if is_packed else text)
    return str(path)


def figures_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["bench", "policy", *arguments, "--json", "-"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def read(path: Path, rows: list[Row]) -> Trace:
    return read_trace(written(path / "trace", rows), block_size=BLOCK)


TWICE = [row(0, 1, 2, 3), row(1, 4, 5, 6), row(2, 1, 2, 3), row(3, 4, 5, 6)]


@pytest.mark.parametrize("is_packed", [False, True])
def test_all_is_reused_of_what_comes_again_in_a_cache_that_holds_it(
    is_packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace", TWICE, is_packed=is_packed)
    figures = figures_of(["--trace", trace, "--capacity-tokens", str(6 * BLOCK)], capsys)
    expected = round(6 * BLOCK / (4 * (3 * BLOCK + 1)), 5)
    assert figures["token_hit_rate"] == figures["lru_token_hit_rate"] == expected
    assert figures["ceiling_token_hit_rate"] == expected
    assert (figures["block_tokens"], figures["num_requests"], figures["evicted_blocks"]) == (BLOCK, 4, 0)
    assert figures["policy"] == Config().kv_cache_policy


def test_lru_loses_a_loop_that_is_longer_than_the_cache_and_the_future_would_keep_part(tmp_path: Path) -> None:
    trace = read(tmp_path, [row(i, *((1, 2, 3), (4, 5, 6))[i % 2]) for i in range(20)])
    assert replay(trace, num_blocks=3, policy="lru").token_hit_rate == 0.0
    assert ceiling(trace, num_blocks=3) > 0.4


def test_of_a_prompt_longer_than_the_cache_its_head_is_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, [row(0, 1, 2, 3, 4), row(1, 1, 2, 3, 4)])
    assert replay(trace, num_blocks=2, policy="lru").token_hit_rate == 2 * BLOCK / trace.num_prompt_tokens


def test_the_block_of_the_last_token_is_computed_again_and_a_partial_block_never_kept(tmp_path: Path) -> None:
    whole = row(0, 1, 2, extra=0)
    partial = {**row(0, 3, extra=9), "hash_ids": [3, 4]}
    for repeated in (whole, partial):
        trace = read(tmp_path, [repeated, {**repeated, "timestamp": 5}])
        assert replay(trace, num_blocks=9, policy="lru").token_hit_rate == BLOCK / trace.num_prompt_tokens


def test_equal_names_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    trace = read(tmp_path, [row(0, 1, 3, 3), row(1, 2, 3, 3), row(2, 3, 3, 1)])
    for rate in (ceiling(trace, num_blocks=99), replay(trace, num_blocks=99, policy="lru").token_hit_rate):
        assert rate == 0.0


def test_prompts_are_replayed_in_the_order_of_their_times(tmp_path: Path) -> None:
    rows = [row(3, 1, 2), row(1, 1, 2), row(2, 3, 4)]
    trace = read(tmp_path, rows)
    assert [request.arrival_s for request in trace.requests] == [1.0, 2.0, 3.0]
    assert replay(trace, num_blocks=2, policy="lru").token_hit_rate == 0.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds nothing"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": [], "output_length": 1}\n', "holds no prompt"),
        ('{"timestamp": 0, "hash_ids": [1], "output_length": 1}\n', "input_length"),
        (
            '{"timestamp": 0, "input_length": 3, "hash_ids": [1, 2, 3, 4, 5], "output_length": 1}\n',
            "size of its blocks",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text(content)
    assert main(["bench", "policy", "--trace", str(tmp_path / "trace"), "--capacity-tokens", "999"]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("kvreuse: error: ") and "Traceback" not in error


def test_a_cache_smaller_than_a_block_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path / "trace", TWICE)
    assert main(["bench", "policy", "--trace", trace, "--capacity-tokens", "9"]) == 1
    assert "less than a block of 64 tokens" in capsys.readouterr().err


def test_a_prompt_that_ends_with_a_block_and_one_that_goes_on_share_it(tmp_path: Path) -> None:
    """The last token of the first is computed again, not the block that the second goes on behind."""
    trace = read(tmp_path, [row(0, 1, 2, extra=0), row(1, 1, 2, 3), row(2, 1, 2, 3)])
    assert replay(trace, num_blocks=9, policy="lru").token_hit_rate == (2 + 3) * BLOCK / trace.num_prompt_tokens


def test_however_long_a_trace_is_its_blocks_are_not_merged(tmp_path: Path) -> None:
    rows = [row(at_s, *range(at_s * 9000, at_s * 9000 + 9000)) for at_s in range(100)]
    path = written(tmp_path / "trace", rows)
    assert read_trace(path, block_size=BLOCK).block_size > BLOCK
    assert read_trace(path, block_size=BLOCK, is_exact=True).block_size == BLOCK
