"""Fuzzed bodies and idle connections against the container's entrypoint, with /ping watched all the while.

    python -m bench.hostile --bodies 20000 --idle 10000

Prints one JSON object: the statuses, whether the canary's answer is unchanged, and how long /ping took at worst.
Knows HTTP and the fuzzed bodies of the tests. Knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

from kvreuse.ops.bench.server import serving
from tests.hostile.bodies import body

CANARY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 6}}
OPTIONS = {"model_id": "demo", "kv_cache_memory_bytes": 256 * 2**20, "max_model_len": 2048}
JSON = {"Content-Type": "application/json"}


def ask(netloc: str, route: str, data: bytes) -> tuple[int, bytes]:
    """One request on a connection of its own; status 0 when the connection broke."""
    connection = HTTPConnection(netloc, timeout=120)
    try:
        connection.request("POST", route, data, JSON)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def watch(netloc: str, stop: Event, times: multiprocessing.Queue[list[float]]) -> None:
    """Ping every 50 ms on new connections until told to stop; in a process of its own, away from the load."""
    taken = []
    while not stop.wait(0.05):
        started = time.perf_counter()
        connection = HTTPConnection(netloc, timeout=10)
        try:
            connection.request("GET", "/ping")
            status = connection.getresponse().status
        except OSError:
            status = 0
        finally:
            connection.close()
        taken.append((time.perf_counter() - started) * 1000 if status == 200 else float("inf"))
    times.put(taken)


@contextmanager
def watched(netloc: str, report: dict[str, object], name: str) -> Iterator[None]:
    """Times of /ping during the block, in milliseconds; null where one failed."""
    context = multiprocessing.get_context("spawn")
    stop, times = context.Event(), context.Queue()
    process = context.Process(target=watch, args=(netloc, stop, times))
    process.start()
    try:
        yield
    finally:
        stop.set()
        taken = sorted(times.get())
        process.join()
    worst = {"p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100], "max": taken[-1]}
    report[name] = {key: round(value, 1) if value < 1e9 else None for key, value in worst.items()} | {"num": len(taken)}


def fuzz(netloc: str, num_bodies: int, num_threads: int) -> dict[str, int]:
    """Statuses of the bodies of seeds 0..num_bodies."""
    counts: Counter[int] = Counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for number, (status, _) in enumerate(pool.map(lambda seed: ask(netloc, *body(seed)), range(num_bodies))):
            counts[status] += 1
            if number % 1000 == 999:
                print(f"{number + 1} of {num_bodies}: {dict(counts)}", file=sys.stderr)
    return {str(status): num for status, num in sorted(counts.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile load against the container")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=16)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report: dict[str, object] = {}
    with serving(OPTIONS) as url:
        netloc = urlsplit(url).netloc
        host, _, port = netloc.partition(":")
        canary = json.dumps(CANARY).encode()
        before = ask(netloc, "/invocations", canary)
        with watched(netloc, report, "ping_ms_fuzz"):
            report["statuses"] = fuzz(netloc, args.bodies, args.threads)
        with ExitStack() as stack, watched(netloc, report, "ping_ms_idle"):
            for _ in range(args.idle):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            report["num_idle"] = args.idle
            time.sleep(2)
            report["canary_during_idle"] = ask(netloc, "/invocations", canary) == before
        report["canary_unchanged"] = ask(netloc, "/invocations", canary) == before
    print(json.dumps(report))


if __name__ == "__main__":
    main()
