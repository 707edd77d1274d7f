"""Every option, declared once: its field, kind, default, unit and meaning.

Knows what may be set and what is sound. Knows nothing of files, environments or flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvreuse.config.kinds import Option, boolean, byte_size, choice, integer, json_object, number, option, text, weights
from kvreuse.errors import ConfigError

__all__ = ["DEFAULT_MODEL_DIR", "OPTIONS", "Config"]

DEFAULT_MODEL_DIR = "/opt/ml/model"  # where SageMaker puts the model artefacts
_MAX_TOKENS = 2**24
_DAY_S = 86_400
_UNITS = {"bytes": "bytes", "tokens": "tokens", "s": "seconds", "ms": "milliseconds"}  # by the end of a name


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole configuration, checked when it is made. Raises ConfigError.

    None means derived: the doc of the option says from what. `sources` says where each value that is not the
    default came from; `ignored` are the lines of the file that belong to DJL Serving alone.
    """

    # A table: default and kind, then the meaning.
    # fmt: off
    engine: str = option("Python", choice("Python"), "DJL's name for the engine that runs the handler", key="engine")
    entry_point: str = option("inference.py", text("a module or file name"),
        "Handler with the toolkit's hooks: looked for in the model's code/ folder, then in the container",
        key="option.entryPoint", env=("SAGEMAKER_PROGRAM",))
    install_requirements: bool = option(False, boolean(),
        "Install the model's code/requirements.txt before the handler is imported")
    model_id: str = option(DEFAULT_MODEL_DIR, text("a local folder, a hub id or demo"),
        "Model to serve: a local folder, a hub id, or demo for the small built-in model")
    trust_remote_code: bool = option(False, boolean(), "Run Python code that comes with the model")
    dtype: str = option("auto",
        choice("auto", "float32", "bfloat16", "float16", fp32="float32", bf16="bfloat16", fp16="float16"),
        "Type of weights and KV; auto is the checkpoint's on a GPU and float32 on a CPU")
    device: str = option("auto", choice("auto", "cpu", "cuda"), "Where the model runs; auto is cuda if present")
    num_threads: int | None = option(None, integer(1, 1024), "CPU threads of one forward; auto fits the machine")
    attention_backend: str = option("auto", choice("auto", "reference", "cpu", "cpu-torch", "cuda", "cuda-gather"),
        "How attention is computed; auto is the fastest that fits model and device")
    max_model_len: int | None = option(None, integer(2, _MAX_TOKENS),
        "Longest prompt plus answer; auto is the model's own limit", unit="tokens")

    kv_cache_reuse: bool = option(True, boolean(), "Reuse the KV of shared prompt prefixes")
    kv_cache_memory_ratio: float = option(0.4, number(0, 0.95, above_low=True),
        "Share of the free device memory that holds KV")
    kv_cache_memory_bytes: int | None = option(None, byte_size(2**12),
        "Memory that holds KV; auto takes kv_cache_memory_ratio of what is free")
    kv_cache_block_size: int = option(32, integer(1, 1024), "Tokens per block, the unit of hashing and reuse",
        unit="tokens")
    kv_cache_policy: str = option("size_weighted_lru", choice("size_weighted_lru", "lru", "lfu"),
        "Order in which blocks are evicted")
    kv_cache_lru_weights: tuple[float, float] = option((0.3, 0.7), weights(2),
        "Weights of frequency and recency in size_weighted_lru")
    kv_cache_ttl_s: float = option(14400, number(1, 365 * _DAY_S), "Time after its last use at which a block expires")
    kv_cache_defrag_interval: float = option(300, number(1, _DAY_S), "Time between compactions of the KV memory",
        unit="seconds")
    kv_cache_dtype: str = option("auto", choice("auto", "bf16", "fp16", "fp8", "int8", "int4"),
        "Type of stored KV; bf16 and fp16 everywhere, fp8, int8 and int4 only in the tiers below the device")
    kv_cache_quant_group_size: int = option(64, integer(8, 1024),
        "Values that share a scale in fp8, int8 and int4, at most")
    host_cache_bytes: int = option(0, byte_size(0), "Host memory for KV below the device; 0 is none")
    disk_cache_dir: str | None = option(None, text("a folder"), "Folder for KV on disk; auto is none")
    disk_cache_bytes: int = option(10 * 2**30, byte_size(2**20), "Disk space for KV")
    remote_cache_url: str | None = option(None, text("a valkey://, redis://, rediss:// or s3:// URL"),
        "Where instances share KV; auto is nowhere", secret=True)
    remote_cache_bytes: int = option(10 * 2**30, byte_size(2**20), "Space for this model's KV in the remote store")
    remote_timeout_ms: int = option(500, integer(1, 60_000), "Longest time for one operation of the remote store")
    tier_write: str = option("through", choice("through", "on_evict", "off"),
        "When blocks go to the tiers below: as they are computed, as they are evicted, or never")
    cross_model_sharing: bool = option(False, boolean(),
        "Share stored KV with models that differ only in what follows the last layer's KV")
    audit_rate: float = option(0.001, number(0, 1), "Share of hits that are computed again and compared")

    max_batch_size: int = option(64, integer(1, 4096), "Sequences that run at the same time")
    max_batch_tokens: int | None = option(None, integer(1, 2**20),
        "Tokens in one step, at least max_batch_size; auto is 256 on CPUs and 2048 on GPUs", unit="tokens")
    max_concurrency: int | None = option(None, integer(1, 2**16),
        "Requests that are admitted at once; auto is max_batch_size x number of devices")
    max_queue: int | None = option(None, integer(0, 2**20),
        "Requests that may wait beyond those; more get 503; auto is 4 x max_concurrency")
    group_min_size: int = option(1, integer(1, 4096),
        "Requests of one prefix to wait for before they start, at most max_batch_size")
    group_max_wait_ms: int = option(0, integer(0, 60_000), "Longest wait for group_min_size")
    group_similarity: float | None = option(None, number(0, 1, above_low=True),
        "Admit prompts of at least this similarity (0.85 is usual) one after the other; auto goes by the first block")
    max_queue_delay_ms: int = option(1000, integer(0, 600_000), "Longest extra wait so that others share a prefix")

    host: str = option("0.0.0.0", text("an address of this machine"), "Address that the server listens on")
    port: int = option(8080, integer(0, 65535), "Port that the server listens on; 0 is any free one",
        env=("SAGEMAKER_BIND_TO_PORT",))
    request_timeout_s: float = option(55, number(0, _DAY_S, above_low=True),
        "Longest time for an answer (SageMaker gives up at 60)")
    stream_timeout_s: float = option(450, number(0, _DAY_S, above_low=True),
        "Longest time for a stream (SageMaker gives up at 480)")
    max_body_bytes: int = option(25 * 2**20, byte_size(2**10), "Largest body of a request")
    max_n: int = option(16, integer(1, 1024), "Most answers to one prompt")
    template_variables: Mapping[str, Any] | None = option(None, json_object(),
        "Variables of the chat template, such as date_string, that a request may replace; auto is none")
    templates_file: str | None = option(None, text("a file or s3://bucket/key"),
        "YAML or JSON file of prompt templates that requests may name; auto is none")
    warmup_budget_s: float = option(120, number(0, _DAY_S),
        "Longest time that templates may take before the first request")
    warmup_interval_s: float = option(30, number(1, _DAY_S), "Time between looks for templates that were evicted")
    tenant_mode: str = option("off", choice("off", "header", "required"),
        "Keep tenants apart: off ignores tenant_header, header takes it where it is sent, required refuses without")
    tenant_header: str = option("X-KVReuse-Tenant", text("a header's name"),
        "Header that names the tenant; in X-Amzn-SageMaker-Custom-Attributes it is tenant=NAME")
    tenant_secret: str | None = option(None, text("any text"),
        "Key that turns tenant names into unguessable ones before they are used; auto is none", secret=True)
    tenant_quota_bytes: int | None = option(None, byte_size(2**12),
        "KV memory that one tenant may keep; auto is no limit")
    session_ttl_s: float = option(1200, number(1, _DAY_S), "Time after which a session that was not closed expires")
    max_sessions: int = option(64, integer(0, 2**16), "Sessions that may be open at the same time")
    status_page: bool = option(True, boolean(), "Serve the page GET /status, which never shows a prompt")
    cloudwatch: str = option("off", choice("off", "on"), "Publish metrics to CloudWatch")
    cloudwatch_namespace: str = option("kvreuse", text("a name that CloudWatch takes"),
        "Namespace of the published metrics")
    cloudwatch_interval_s: float = option(60, number(1, 3600), "Time between two publications")
    emf: bool = option(False, boolean(), "Write the published metrics to stdout in embedded metric format too")
    endpoint_name: str = option("local", text("the endpoint's name"),
        "Dimension EndpointName; SageMaker tells no container its name")
    variant_name: str = option("AllTraffic", text("the variant's name"), "Dimension VariantName")
    otel_endpoint: str | None = option(None, text("a URL"),
        "Collector that takes a trace of every request over OTLP/HTTP; auto is none; needs the extra otel")
    model_server_workers: int = option(1, integer(1, 4096),
        "Workers that the stock model server would start; kvreuse is one process and warns when it is more",
        env=("SAGEMAKER_MODEL_SERVER_WORKERS",))
    log_level: str = option("info", choice("debug", "info", "warning", "error"), "Least severe log line shown")
    # fmt: on
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            declared.check(getattr(self, name))
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_batch_size:
            raise ConfigError(
                f"option.max_batch_tokens is {self.max_batch_tokens}, "
                f"allowed is at least option.max_batch_size ({self.max_batch_size})\n"
                "hint: every running sequence needs a token per step"
            )
        if self.group_min_size > self.max_batch_size:
            raise ConfigError(
                f"option.group_min_size is {self.group_min_size}, "
                f"allowed is at most option.max_batch_size ({self.max_batch_size})\n"
                "hint: a larger group never fills"
            )

    def concurrency(self, *, num_devices: int = 1) -> int:
        """max_concurrency, derived when it is None."""
        return self.max_batch_size * num_devices if self.max_concurrency is None else self.max_concurrency

    def step_tokens(self, *, is_cpu: bool) -> int:
        """max_batch_tokens, derived when it is None: so few that a prefill just has full speed and others wait less."""
        return self.max_batch_tokens or max(self.max_batch_size, 256 if is_cpu else 2048)

    def queue_limit(self, *, num_devices: int = 1) -> int:
        """max_queue, derived when it is None."""
        return 4 * self.concurrency(num_devices=num_devices) if self.max_queue is None else self.max_queue

    def effective(self) -> list[str]:
        """The lines to log once at start: `key=value (source)`, then what was ignored. Secrets are masked."""
        lines = [
            f"{declared.key}={declared.shown(getattr(self, name))} ({self.sources.get(name, 'default')})"
            for name, declared in OPTIONS.items()
        ]
        return lines + [f"{line} ignored (a setting of DJL Serving only)" for line in self.ignored]


def _named(name: str, declared: Option) -> Option:
    unit = declared.unit or _UNITS.get(name.rpartition("_")[2], "")
    return replace(declared, key=declared.key or f"option.{name}", unit=unit)


OPTIONS: Mapping[str, Option] = {
    item.name: _named(item.name, item.metadata["option"]) for item in fields(Config) if item.metadata
}
