"""What `kvreuse explain` finds in a log, and how it says so."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvreuse.cli.main import main
from kvreuse.ops.explain.findings import UNNAMED, explain, read

NOON = 1_800_014_400.0  # 2027-01-15T12:00:00Z


def line(**more: Any) -> dict[str, Any]:
    return {
        "event": "request", "time": NOON, "status": 200, "duration_ms": 100.0, "prompt_tokens": 100,
        "cached_tokens": 90, "tier": "device", "lookup_ms": 0.1, "queue_ms": 1.0, "ttft_ms": 10.0, **more,
    }  # fmt: skip


def miss(**more: Any) -> dict[str, Any]:
    return line(**{"cached_tokens": 0, "tier": "none", "miss_reason": "cold", "ttft_ms": 50.0, **more})


def test_the_hit_rate_is_in_tokens_by_template_and_by_hour() -> None:
    found = explain([line(template="a"), miss(template="a", time=NOON + 3600), line(prompt_tokens=10, cached_tokens=0)])
    assert found["hit_rate"] == pytest.approx(90 / 210)
    assert [(t["name"], t["num_requests"], t["hit_rate"]) for t in found["templates"]] == [
        ("a", 2, 0.45),
        (UNNAMED, 1, 0.0),
    ]
    assert [(h["hour"], h["num_requests"]) for h in found["hours"]] == [
        ("2027-01-15T12:00Z", 2),
        ("2027-01-15T13:00Z", 1),
    ]


def test_the_positions_at_which_prompts_of_a_template_part_are_counted() -> None:
    parted = [line(template="a", miss_reason="diverged", diverged_at=place) for place in (17, 17, 64)]
    assert explain(parted)["templates"][0]["diverged_at"] == [(17, 2), (64, 1)]


def test_times_of_hits_and_misses_are_told_apart() -> None:
    found = explain([line(ttft_ms=float(ms)) for ms in range(1, 101)] + [miss(ttft_ms=400.0)])
    assert found["ttft_hit_ms"] == {"count": 100, "p50": 51, "p99": 100}
    assert found["ttft_miss_ms"] == {"count": 1, "p50": 400, "p99": 400}


def test_a_request_that_failed_counts_as_one_and_has_no_times() -> None:
    failed = {"event": "request", "time": NOON, "status": 503, "error": "overloaded"}
    found = explain([line(), failed])
    assert (found["num_requests"], found["num_failed"], found["failures"]) == (2, 1, {"overloaded": 1})
    assert found["ttft_ms"]["count"] == 1


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (miss(ttft_ms=900.0), "90 x p50: misses"),
        (line(ttft_ms=900.0, queue_ms=800.0), "90 x p50: queueing"),
        (line(ttft_ms=900.0), "90 x p50: neither"),
    ],
)
def test_a_long_tail_is_put_down_to_what_the_slowest_have_in_common(slow: dict[str, Any], said: str) -> None:
    tales = explain([line() for _ in range(60)] + [slow])["tell_tales"]
    assert len(tales) == 1
    assert said in tales[0]


def test_a_heavy_index_and_a_frequent_reason_are_told() -> None:
    tales = explain([line(lookup_ms=30.0), miss(miss_reason="evicted", lookup_ms=30.0)])["tell_tales"]
    assert [tale.split(":")[0] for tale in tales] == ["looking up takes 30% of the time", "evicted in 50% of requests"]


def test_prompts_that_part_after_what_they_share_are_no_fault() -> None:
    late, early = (line(miss_reason="diverged", diverged_at=place) for place in (96, 7))
    assert explain([late] * 10)["tell_tales"] == []
    (tale,) = explain([early] * 10)["tell_tales"]
    assert tale.startswith("diverged in 100% of requests: they part in their first half")


def test_a_sound_log_tells_nothing_out_of_the_ordinary() -> None:
    assert explain([line() for _ in range(10)])["tell_tales"] == []


def test_other_lines_are_passed_over_and_prefixes_too() -> None:
    lines = ["", "INFO ready", '{"_aws": {}}', "{broken", "[1]", "2027-01-15 host " + json.dumps(line())]
    assert len(read(lines)) == 1


# --- the command


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("\n".join(json.dumps(r) for r in [line(template="</script>"), miss(), miss()]), "utf-8")
    return path


def test_the_table_is_on_stdout(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert "hit rate: 30.0% of prompt tokens" in out
    assert "miss reasons: cold 2" in out
    assert "- cold in 67% of requests: first sight" in out


def test_json_on_stdout_sends_the_table_to_stderr(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["misses"] == {"cold": 2}
    assert "hit rate" in err


def test_the_log_may_come_from_stdin(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(log.read_text("utf-8")))
    assert main(["explain", "-"]) == 0
    assert capsys.readouterr().out.startswith("requests: 3, of which failed: 0")


def test_a_log_without_requests_or_without_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("nothing\n", "utf-8")
    assert main(["explain", str(empty)]) == main(["explain", str(tmp_path / "absent")]) == 1
    err = capsys.readouterr().err
    assert "holds no line of a request" in err
    assert "absent: No such file" in err


def test_no_name_in_the_log_can_end_the_script_of_the_page(log: Path, tmp_path: Path) -> None:
    assert main(["explain", str(log), "--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "x.json")]) == 0
    assert (tmp_path / "page.html").read_text("utf-8").count("</script>") == 1
    assert json.loads((tmp_path / "x.json").read_text("utf-8"))["num_requests"] == 3
