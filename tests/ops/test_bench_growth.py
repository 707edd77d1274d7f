"""`kvreuse bench growth`: what it puts into the store, its axes with the demo model, and what is called too steep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from xml.etree import ElementTree

import pytest

from kvreuse.cache.store import PrefixCache
from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.growth import _Ground, steepest
from kvreuse.types import Scope


def ground(num_blocks: int = 64) -> tuple[_Ground, PrefixCache]:
    cache = PrefixCache(
        num_slots=num_blocks * 32, block_size=32, bytes_per_token=1, move_slots=lambda source, target, length: None
    )
    pool = SimpleNamespace(num_slots=num_blocks * 32, heads=[])
    return _Ground(cast(Any, SimpleNamespace(cache=cache, pool=pool, vocab_size=1000))), cache


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_a_planted_prefix_is_one_chain_of_so_many_nodes_in_one_physical_run(num_nodes: int) -> None:
    made, cache = ground()
    prefix = made.plant(made.prefix("a", 256), num_nodes=num_nodes)
    assert cache.usage().num_nodes == num_nodes
    with cache.acquire([*prefix, 1], scope=Scope()) as lease:
        assert lease.num_cached_tokens == 256
        assert len(lease.runs(256)) == 1
    cache.check_integrity()


def test_planting_again_changes_nothing_and_another_name_is_another_prefix() -> None:
    made, cache = ground()
    for _ in range(2):
        made.plant(made.prefix("a", 64))
    assert cache.usage().num_blocks == 2
    made.plant(made.prefix("b", 64))
    assert cache.usage().num_blocks == 4


def test_the_shorter_prefix_of_a_name_begins_the_longer_one() -> None:
    made, _ = ground()
    assert made.prefix("a", 64)[:32] == made.prefix("a", 32)


def test_a_prefix_that_does_not_fit_is_refused() -> None:
    made, _ = ground(num_blocks=2)
    with pytest.raises(ConfigError, match="too small"):
        made.plant(made.prefix("a", 96))


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ({1: [10.0], 2: [20.0], 4: [40.0]}, 1.0),
        ({1: [10.0], 2: [10.0], 4: [40.0]}, 2.0),
        ({1: [10.0, 20.0], 2: [20.0, 80.0]}, 0.0),
        ({1: [10.0], 10: [100.0], 100: [100.0]}, 1.0),
    ],
)
def test_the_steepest_slope_is_that_between_neighbours_beyond_noise(
    taken: dict[int, Sequence[float]], expected: float
) -> None:
    assert steepest(taken) == pytest.approx(expected)


class Run(NamedTuple):
    code: int
    axes: dict[str, Any]
    plot: Path


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The measurement with the demo model."""
    folder = tmp_path_factory.mktemp("growth")
    files = ["--json", str(folder / "figures.json"), "--plot", str(folder / "plot.svg")]
    code = main(["bench", "growth", "--quick", "--steps=1", "--threads=1", *files])
    axes = json.loads((folder / "figures.json").read_text("utf-8"))["axes"]
    return Run(code, axes, folder / "plot.svg")


def test_every_axis_is_measured_at_every_point(quick: Run) -> None:
    assert {name: [x for x, _ in axis["points"]] for name, axis in quick.axes.items()} == {
        "running sequences": [1, 2, 4],
        "prefix tokens": [256, 512],
        "nodes of the prefix": [1, 2, 4],
        "templates running": [1, 2, 4],
        "templates in the store": [1, 10],
    }
    assert all(step_ms > 0 for axis in quick.axes.values() for _, step_ms in axis["points"])


def test_the_exit_code_says_whether_an_axis_is_too_steep(quick: Run) -> None:
    assert quick.code == any(axis["steepest"] > 1.15 for axis in quick.axes.values())


def test_the_plot_names_every_axis(quick: Run) -> None:
    assert set(quick.axes) <= set(ElementTree.parse(quick.plot).getroot().itertext())


def test_every_axis_and_figure_is_documented(quick: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text("utf-8")
    section = page.partition("## kvreuse bench growth\n")[2].partition("\n## ")[0]
    for name, axis in quick.axes.items():
        assert f"| {name} | " in section
        assert all(f"| `{figure}` | " in section for figure in axis)
