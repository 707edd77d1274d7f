"""What a start warns of, and that a sound one warns of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvreuse.config import Config, load_config
from kvreuse.config.guards import doubts

SOUND = {"num_devices": 1, "num_slots": 32_000, "max_model_len": 8192, "free_host_bytes": 2**30}


def said(config: Config, **more: int) -> list[str]:
    return list(doubts(config, **{**SOUND, **more}))


def test_a_sound_start_warns_of_nothing() -> None:
    assert said(Config()) == []
    assert said(Config(max_concurrency=128), num_devices=2) == []
    assert said(Config(max_model_len=1024), num_slots=1024) == []


@pytest.mark.parametrize(
    ("options", "numbers", "words"),
    [
        ({"max_concurrency": 65}, {}, "more than option.max_batch_size x devices (64)"),
        ({}, {"num_slots": 8191}, "holds 8191 tokens, fewer than one longest request (8192)"),
        ({"max_model_len": 2048}, {"num_slots": 2047}, "fewer than one longest request (2048)"),
        ({"kv_cache_block_size": 1}, {"free_host_bytes": 40_000_000}, "the index may take 0.04 GiB"),
        ({"host_cache_bytes": 2**31}, {}, "option.host_cache_bytes 2.00 GiB, free are 1.00 GiB"),
        ({"model_server_workers": 4}, {}, "4 workers are configured"),
    ],
)
def test_each_doubt_is_one_sentence_with_its_numbers(
    options: dict[str, Any], numbers: dict[str, int], words: str
) -> None:
    (sentence,) = said(Config(**options), **numbers)
    assert words in sentence
    assert ";" in sentence or ":" in sentence


@pytest.mark.parametrize("line", ["minWorkers=2", "gpu.maxWorkers=8"])
def test_workers_of_djl_serving_are_seen_too(line: str, tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    path.write_text(f"engine=Python\n{line}\nbatch_size=9\n", "utf-8")
    (sentence,) = said(load_config({}, {}, path))
    assert sentence.startswith(f"{line[-1]} workers are configured")
