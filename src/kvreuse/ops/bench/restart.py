"""`kvreuse bench restart`: what a template costs after a crash, and on an instance that never saw it.

A server computes templates with its disk tier (and a shared Redis) on, and is killed with SIGKILL. A second one starts
on the same disk; a third on an empty disk with the same Redis. Knows the order of the measurement. Knows nothing of
tiers.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.load import Ask, Client, Reply
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.report import Report, as_table, environment, ratio
from kvreuse.ops.bench.server import free_port, serving
from kvreuse.ops.bench.workload import Workload, load_tokenizer

__all__ = ["add_flags", "measure"]

_SETTLE_S = 1.0
_SETTLE_LIMIT_S = 60.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--templates", type=at_least(1), default=3, metavar="N", help="templates, one request each")
    parser.add_argument("--prefix-tokens", type=at_least(64), default=1024, metavar="N", help="tokens of a template")
    parser.add_argument("--own-tokens", type=at_least(16), default=32, metavar="N", help="further tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=8, metavar="N", help="tokens of an answer")
    parser.add_argument(
        "--remote-url", metavar="URL", help="shared store; the default starts redis-server if there is one"
    )
    parser.add_argument("--model", default="demo", help="model to serve: demo or a folder")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV of the served model")


def measure(args: argparse.Namespace) -> Report:
    """Raises ConfigError when it cannot begin, LoadError when a server does not answer as it should."""
    workload = Workload(
        load_tokenizer(args.model), prefix_tokens=args.prefix_tokens, own_tokens=args.own_tokens, seed=0, marker=""
    )
    prompts = [workload.variant(template) for template in range(args.templates)]
    warm_up = workload.variant(args.templates + 1)
    progress = Progress(sys.stderr, num_steps=3)
    with tempfile.TemporaryDirectory() as folder, _remote(args.remote_url) as remote_url:
        options: dict[str, object] = {"model_id": args.model, "dtype": args.dtype, "disk_cache_dir": f"{folder}/a"}
        if remote_url:
            options["remote_cache_url"] = remote_url
        runs: dict[str, list[Reply]] = {}
        for name, change, is_killed in (
            ("cold", {}, True),
            ("disk", {}, False),
            ("remote", {"disk_cache_dir": f"{folder}/b"}, False),
        ):
            progress.start(f"first requests: {name}")
            if name != "remote" or remote_url:
                with serving({**options, **change}, is_killed=is_killed) as url:
                    runs[name] = _first_requests(Client(url), warm_up, prompts, args.max_new_tokens)
                    _settle(Path(folder))
            progress.advance()
    progress.close()
    return _report(args, runs)


def _first_requests(client: Client, warm_up: str, prompts: list[str], max_new_tokens: int) -> list[Reply]:
    """The warm-up is of a template that is not used again: code paths are warm afterwards, the store is not."""
    client.ask(Ask(text=warm_up, max_new_tokens=1, reuse=False))
    return [client.ask(Ask(text=prompt, max_new_tokens=max_new_tokens)) for prompt in prompts]


def _settle(folder: Path) -> None:
    """Until what was computed is stored: the folder does not change any more."""
    deadline, before = time.monotonic() + _SETTLE_LIMIT_S, -1
    while time.monotonic() < deadline:
        num_files = sum(1 for path in folder.rglob("*") if path.is_file())
        if num_files == before:
            return
        before = num_files
        time.sleep(_SETTLE_S)


@contextmanager
def _remote(url: str | None) -> Iterator[str | None]:
    """A Redis for the time of the measurement; None without one."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if url is not None or server is None:
        yield url
        return
    port = free_port()
    process = subprocess.Popen(
        [server, "--port", str(port), "--save", "", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _report(args: argparse.Namespace, runs: Mapping[str, list[Reply]]) -> Report:
    ttft = {name: statistics.median(reply.ttft_ms or 0.0 for reply in replies) for name, replies in runs.items()}
    rate = {
        name: sum(r.cached_tokens for r in replies) / sum(r.prompt_tokens for r in replies)
        for name, replies in runs.items()
    }
    is_equal = len({tuple(reply.text for reply in replies) for replies in runs.values()}) == 1
    keys = {"cold": "ttft_cold_ms", "disk": "ttft_after_restart_disk_ms", "remote": "ttft_new_instance_remote_ms"}
    figures = {
        **{key: round(ttft[name], 3) if name in ttft else None for name, key in keys.items()},
        **{f"token_hit_rate_{name}": round(rate[name], 4) if name in rate else None for name in keys},
        "outputs_equal": is_equal,
        "num_outputs_compared": args.templates * (len(runs) - 1),
        "settings": {name: getattr(args, name) for name in ("templates", "prefix_tokens", "own_tokens", "dtype")},
        "environment": environment(),
    }
    titles = {"disk": "first request after a kill, same disk", "remote": "first request of a new instance, same Redis"}
    rows = [
        (f"{title}, TTFT", f"{ttft['cold']:.0f} ms", f"{ttft[name]:.0f} ms", ratio(ttft["cold"], ttft[name]))
        for name, title in titles.items()
        if name in ttft
    ]
    fault = None if is_equal or args.dtype != "float32" else "answers differ from those of the first server"
    if rate["disk"] == 0:
        raise ConfigError("the restarted server found nothing on the disk")
    return Report(figures=figures, table=as_table(rows), fault=fault)
