"""Who is compared, and how each is started: the same model, dtype, threads and 2 GiB of KV for all.

Knows command lines and folders. Knows nothing of the load or of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FOLDER", "MODEL", "PEERS", "ROOT", "Launch", "Peer", "environment"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers"
MODEL = FOLDER / "model"
_KV_GIB = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a server is started with. dtype: float32 or bfloat16, of weights and KV."""

    dtype: str
    num_threads: int
    concurrency: int
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """stamp: the file that says it is installed. version: for a peer whose health route does not tell it.

    reset: route that empties its cache, which spares a slow start.

    concurrencies: None is all. Of a peer that takes one request at a time, the others would only measure its queue.
    """

    name: str
    title: str
    stamp: Path
    command: Callable[[Launch], list[str]]
    version: str = ""
    health: str = "/health"
    reset: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    concurrencies: tuple[int, ...] | None = None

    @property
    def is_installed(self) -> bool:
        return self.stamp.exists()


def environment(peer: Peer, num_threads: int) -> dict[str, str]:
    """What every peer is started with: nobody spins, nobody looks for a hub."""
    common = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**common, "TOKENIZERS_PARALLELISM": "false", **peer.environment}


def _kvreuse(launch: Launch) -> list[str]:
    options = {
        "model_id": MODEL.resolve(),
        "dtype": launch.dtype,
        "num_threads": launch.num_threads,
        "host": "127.0.0.1",
        "port": launch.port,
        "kv_cache_memory_bytes": f"{_KV_GIB}GiB",
        "request_timeout_s": 900,
        "log_level": "warning",
    }
    return [str(ROOT / ".venv/bin/kvreuse"), "serve", *(f"--{name}={value}" for name, value in options.items())]


def _library(name: str, python: Path, model: Path) -> Callable[[Launch], list[str]]:
    def command(launch: Launch) -> list[str]:
        start = [str(python), "-m", "bench.peers.serve", "--peer", name, "--model", str(model)]
        return [*start, f"--dtype={launch.dtype}", f"--threads={launch.num_threads}", f"--port={launch.port}"]

    return command


def _vllm(launch: Launch) -> list[str]:
    start = [str(FOLDER / "vllm/bin/vllm"), "serve", str(MODEL), "--served-model-name=m", "--host=127.0.0.1"]
    return [*start, f"--dtype={launch.dtype}", f"--port={launch.port}", "--enable-prefix-caching"]


def _llamacpp(launch: Launch) -> list[str]:
    kind = {"float32": "f32", "bfloat16": "bf16"}[launch.dtype]
    num_slots = max(launch.concurrency, 8)
    flags = {
        "-m": FOLDER / f"llamacpp/model-{kind}.gguf",
        "-np": num_slots,
        "-c": num_slots * 2304,  # 2,048 + 48 + 64 tokens and some room, for each slot
        "-ctk": kind,
        "-ctv": kind,
        "-t": launch.num_threads,
        "-tb": launch.num_threads,
        "--cache-ram": 4096,
        "-fa": "on",
        "--host": "127.0.0.1",
        "--port": launch.port,
    }
    start = [str(FOLDER / "llamacpp/build/bin/llama-server"), "--cache-prompt", "--no-webui"]
    return [*start, *(str(word) for flag in flags.items() for word in flag)]


_REPOSITORY = ROOT / ".venv/bin/python"
_ROSTER = (
    Peer(name="kvreuse", title="kvreuse", stamp=_REPOSITORY, command=_kvreuse, health="/ping"),
    Peer(
        name="openvino",
        title="OpenVINO GenAI",
        stamp=FOLDER / "openvino.ready",
        command=_library("openvino", FOLDER / "openvino/bin/python", FOLDER / "openvino/model"),
    ),
    Peer(
        name="vllm",
        title="vLLM",
        stamp=FOLDER / "vllm.ready",
        command=_vllm,
        version="0.32.0",
        reset="/reset_prefix_cache",
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    Peer(
        name="llamacpp",
        title="llama.cpp",
        stamp=FOLDER / "llamacpp.ready",
        command=_llamacpp,
        version="b11434",
    ),
    Peer(
        name="transformers_cb",
        title="Transformers continuous batching",
        stamp=FOLDER / "transformers.ready",
        command=_library("transformers_cb", _REPOSITORY, MODEL),
    ),
    Peer(
        name="transformers",
        title="Transformers generate",
        stamp=FOLDER / "transformers.ready",
        command=_library("transformers", _REPOSITORY, MODEL),
        concurrencies=(1,),
    ),
)
PEERS = {peer.name: peer for peer in _ROSTER}
