"""What is wanted: a model with its options, the instances it runs on, and a canary beside it.

Knows names, defaults, limits and the environment of a container. Knows nothing of AWS calls.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvreuse.config import FLAG_NAMES, OPTIONS, Config, load_config, unknown
from kvreuse.config.kinds import Kind, Option, choice, integer, number, option
from kvreuse.errors import ConfigError

__all__ = ["ALIASES", "MAIN", "Canary", "Hosting", "Source", "Variant", "by_field", "variants"]

MAIN, CANARY = "main", "canary"
# Names that people know from elsewhere -> ours.
ALIASES = {"kv_cache_batch_size": "max_batch_size", "enable_kv_sharing": "kv_cache_reuse"}
# Settings that exist in SageMaker, but not for an endpoint whose variants name their model.
_ELSEWHERE = {
    "keep_alive_period_in_seconds": "warm pools belong to training jobs; initial_instance_count keeps instances up",
    "managed_instance_scaling": "it belongs to inference components; max_instance_count scales this endpoint",
}


def _matching(pattern: str, allowed: str) -> Kind:
    return Kind(str, lambda value: bool(re.fullmatch(pattern, str(value))), allowed)


def _required(kind: Kind, doc: str) -> Any:
    """A setting without a default."""
    return field(metadata={"option": Option(kind=kind, doc=doc, default=MISSING)})


_NAME = _matching(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", "1 to 63 letters, digits and inner dashes")


class _Checked:
    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if declared := item.metadata.get("option"):
                replace(declared, key=item.name).check(getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class Source(_Checked):
    """What runs, and as whom.

    options: option -> value, in any spelling of `kvreuse serve`, or a name of ALIASES. env: further variables.
    """

    model_data: str = _required(
        _matching(r"s3://[^/]+/?(?!.*\.t?gz$).*", "an S3 prefix with an unpacked model, such as s3://bucket/model/"),
        "S3 prefix with the unpacked model",
    )
    role: str = _required(_matching(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "the ARN of an IAM role"), "Execution role")
    image_uri: str = _required(_matching(r"\S{1,255}", "an image in ECR"), "Container image")
    options: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    vpc_config: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Canary(_Checked):
    """A second variant of one instance that takes `weight` of the traffic, with other options."""

    weight: float = _required(number(0, 0.999, above_low=True), "Its share of the traffic")
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Hosting(_Checked):
    """Where and how it runs."""

    # fmt: off
    endpoint_name: str = option("kvreuse", _NAME, "")
    instance_type: str = _required(_matching(r"ml\.\w[\w-]*\.\w+", "such as ml.g5.xlarge"), "Type of instance")
    initial_instance_count: int = option(1, integer(1, 10_000), "Instances, the fewest under autoscaling")
    max_instance_count: int | None = option(None, integer(1, 10_000),
        "Most instances; autoscaling is on if that is more")
    autoscaling_metric: str = option("concurrency", choice("concurrency", "gpu"), "What is kept at a target")
    autoscaling_target: float | None = option(None, number(0, 1e6, above_low=True),
        "Of each instance: requests (auto: 0.75 x max_batch_size), GPU percent (auto: 60)")
    scale_out_cooldown_s: int = option(300, integer(0, 86_400), "Seconds between two additions")
    scale_in_cooldown_s: int = option(1800, integer(0, 86_400), "Seconds between two removals; each drops a store")
    inference_ami_version: str | None = option(None, _NAME, "Image of the instance; auto runs CUDA 13 on GPU types")
    volume_size_gb: int | None = option(None, integer(1, 512), "Disk, only for types without one of their own")
    startup_timeout_s: int = option(1800, integer(60, 3600), "Seconds until the container must be ready")
    download_timeout_s: int = option(1800, integer(60, 3600), "Seconds until the model must be downloaded")
    prefix_length_bytes: int = option(4096, integer(1024, 65_536), "Start of a body by which instances share requests")
    prefix_concurrency: int | None = option(None, integer(1, 1024),
        "Requests in an instance beyond which others take over; auto is max_batch_size")
    bake_s: int = option(600, integer(0, 3600), "Seconds that an update is watched before the old instances go")
    hit_rate_alarm: float = option(0.7, number(0, 1, above_low=True), "Hit rate below which an alarm goes off")
    alarm_topic: str | None = option(None, _matching(r"arn:aws[a-z-]*:sns:\S+", "an ARN of SNS"),
        "Topic that alarms go to")
    # fmt: on
    canary: Canary | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Hosting:
        """From keywords. Raises ConfigError for an unknown one; it names the nearest, or where such a thing belongs."""
        for name in settings:
            if name in _ELSEWHERE:
                raise ConfigError(f"{name} does not apply\nhint: {_ELSEWHERE[name]}")
            if name not in cls.__dataclass_fields__:
                raise unknown("setting", name, cls.__dataclass_fields__, help_command="kvreuse deploy --help")
        if missing := {item.name for item in fields(cls) if item.default is MISSING} - set(settings):
            raise ConfigError(f"{missing.pop()} is missing")
        return cls(**settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One fleet of the endpoint. `config` is what its container will read from `environment`."""

    name: str
    environment: Mapping[str, str]
    config: Config
    weight: float
    count: int
    min_count: int
    max_count: int

    @property
    def is_scaled(self) -> bool:
        return self.max_count > self.min_count


def variants(source: Source, hosting: Hosting) -> tuple[Variant, ...]:
    """The main variant, then the canary if there is one. Only the main one scales. Raises ConfigError."""
    canary, count = hosting.canary, hosting.initial_instance_count
    options = by_field(source.options)
    most = max(count, hosting.max_instance_count or count)
    main = _variant(source, hosting, MAIN, options, weight=1 - canary.weight if canary else 1, counts=(count, most))
    if canary is None:
        return (main,)
    changed = options | by_field(canary.options)
    return main, _variant(source, hosting, CANARY, changed, weight=canary.weight, counts=(1, 1))


def _variant(
    source: Source, hosting: Hosting, name: str, options: Mapping[str, str], *, weight: float, counts: tuple[int, int]
) -> Variant:
    """counts: fewest and most instances. The model's own serving.properties, over which these win, is not seen."""
    identity = {"endpoint_name": hosting.endpoint_name, "variant_name": name, "cloudwatch": "on"}
    chosen = {f"OPTION_{option.upper()}": value for option, value in (identity | dict(options)).items()}
    environment = {**source.env, **chosen}
    config = load_config({}, env=environment, properties_path=Path(os.devnull))
    fewest, most = counts
    numbers = {"count": fewest, "min_count": fewest, "max_count": most}
    return Variant(name=name, environment=environment, config=config, weight=weight, **numbers)


def by_field(options: Mapping[str, object]) -> dict[str, str]:
    """Option -> its value as text, by the name of the field."""
    named: dict[str, str] = {}
    for spelling, value in options.items():
        name = ALIASES.get(spelling.removeprefix("option.")) or FLAG_NAMES.get(spelling)
        if name is None:
            known = [*ALIASES, *OPTIONS, *(option.key for option in OPTIONS.values())]
            raise unknown("option", spelling, known)
        if name in named:
            raise ConfigError(f"option.{name} is given twice, under two spellings")
        named[name] = _text(value)
    return named


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
