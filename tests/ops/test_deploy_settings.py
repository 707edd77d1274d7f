"""What may be asked of a deployment: options under every name, limits, flags, and how a mistake is refused."""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from ops.aws import ROLE

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.deploy import Canary, Hosting, KVReuseModel
from kvreuse.ops.deploy.cli import _SETTINGS
from kvreuse.ops.deploy.settings import Source, variants

DOC = Path(__file__).parents[2] / "docs" / "deploy.md"
FLAGS = {"--model-data": "s3://b/m/", "--role": ROLE, "--image-uri": "image:1", "--instance-type": "ml.g5.xlarge"}


def environment(options: dict[str, Any] | None = None, *, env: dict[str, str] | None = None) -> dict[str, str]:
    source = Source(model_data="s3://b/m", role=ROLE, image_uri="image:1", options=options or {}, env=env or {})
    return dict(variants(source, Hosting(instance_type="ml.g5.xlarge"))[0].environment)


def command(*more: str, without: str = "") -> list[str]:
    flags = [part for flag, value in FLAGS.items() if flag != without for part in (flag, value)]
    return ["deploy", "toy", *flags, *more]


@pytest.mark.parametrize(
    ("name", "value", "variable", "text"),
    [
        ("kv_cache_batch_size", 8, "OPTION_MAX_BATCH_SIZE", "8"),
        ("enable_kv_sharing", False, "OPTION_KV_CACHE_REUSE", "false"),
        ("option.enable_kv_sharing", True, "OPTION_KV_CACHE_REUSE", "true"),
        ("option.kv_cache_memory_ratio", 0.6, "OPTION_KV_CACHE_MEMORY_RATIO", "0.6"),
        ("kv-cache-policy", "lru", "OPTION_KV_CACHE_POLICY", "lru"),
        ("kv_cache_lru_weights", (0.5, 0.5), "OPTION_KV_CACHE_LRU_WEIGHTS", "0.5,0.5"),
        ("kv_cache_dtype", "bf16", "OPTION_KV_CACHE_DTYPE", "bf16"),
        ("kv_cache_quant_group_size", 64, "OPTION_KV_CACHE_QUANT_GROUP_SIZE", "64"),
        ("template_variables", {"date": "today"}, "OPTION_TEMPLATE_VARIABLES", '{"date": "today"}'),
        ("endpoint_name", "other", "OPTION_ENDPOINT_NAME", "other"),
    ],
)
def test_an_option_becomes_the_variable_that_the_container_reads(
    name: str, value: object, variable: str, text: str
) -> None:
    assert environment({name: value})[variable] == text


def test_a_container_is_told_its_endpoint_and_variant_and_to_publish() -> None:
    assert environment(env={"MINE": "1"}) == {
        "MINE": "1",
        "OPTION_ENDPOINT_NAME": "kvreuse",
        "OPTION_VARIANT_NAME": "main",
        "OPTION_CLOUDWATCH": "on",
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_cache_batch_sise": 8}, "unknown option kv_cache_batch_sise\nhint: did you mean kv_cache_batch_size"),
        ({"option.kv_cache_memory_ration": 1}, "did you mean option.kv_cache_memory_ratio"),
        ({"kv_cache_batch_size": 8, "max_batch_size": 4}, "option.max_batch_size is given twice"),
        ({"kv_cache_memory_ratio": 2}, "option.kv_cache_memory_ratio is '2', allowed is"),
        ({"max_batch_size": 64, "max_batch_tokens": 32}, "allowed is at least option.max_batch_size"),
    ],
)
def test_an_option_that_the_container_would_refuse_is_refused_here(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment(options)
    assert sentence in caught.value.message


def test_a_variable_that_the_container_would_refuse_is_refused_here() -> None:
    with pytest.raises(ConfigError, match="unknown environment variable OPTION_NONE"):
        environment(env={"OPTION_NONE": "1"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("endpoint_name", "a_b"),
        ("endpoint_name", "-a"),
        ("endpoint_name", "n" * 64),
        ("instance_type", "g5.xlarge"),
        ("initial_instance_count", 0),
        ("max_instance_count", 0),
        ("autoscaling_metric", "memory"),
        ("autoscaling_target", 0),
        ("startup_timeout_s", 59),
        ("startup_timeout_s", 3601),
        ("download_timeout_s", 59),
        ("download_timeout_s", 3601),
        ("volume_size_gb", 513),
        ("prefix_length_bytes", 1023),
        ("prefix_length_bytes", 65_537),
        ("prefix_concurrency", 1025),
        ("bake_s", 3601),
        ("hit_rate_alarm", 0),
        ("alarm_topic", "alarms"),
    ],
)
def test_a_setting_outside_of_the_limits_of_aws_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is '{value}', allowed is "):
        Hosting.of({"instance_type": "ml.g5.xlarge", setting: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_data": "/opt/ml/model"}, "allowed is an S3 prefix with an unpacked model"),
        ({"model_data": "s3://b/model.tar.gz"}, "allowed is an S3 prefix with an unpacked model"),
        ({"role": "kvreuse"}, "allowed is the ARN of an IAM role"),
        ({"image_uri": ""}, "allowed is an image in ECR"),
    ],
)
def test_a_model_that_cannot_be_hosted_is_refused(changes: dict[str, str], sentence: str) -> None:
    given = {"model_data": "s3://b/m", "role": ROLE, "image_uri": "image:1"} | changes
    with pytest.raises(ConfigError, match=sentence):
        KVReuseModel(**given)


@pytest.mark.parametrize("weight", [0, 1, -0.5])
def test_a_canary_with_none_or_all_of_the_traffic_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight is"):
        Canary(weight=weight)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"inital_instance_count": 1}, "did you mean initial_instance_count"),
        ({"keep_alive_period_in_seconds": 60}, "warm pools belong to training jobs"),
        ({"managed_instance_scaling": {}}, "it belongs to inference components"),
        ({"bake_s": 1}, "instance_type is missing"),
    ],
)
def test_an_unknown_setting_says_what_is_meant_or_where_it_belongs(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hosting.of(settings)
    assert sentence in caught.value.message


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_needed_is_asked_for(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(without=flag)) == 1
    assert capsys.readouterr().err == f"kvreuse: error: {flag} is missing\nhint: kvreuse deploy --help\n"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--startup-timeout-s", "soon"], "startup_timeout_s is 'soon', allowed is an integer from 60 to 3600"),
        (["--set", "max_batch_size"], "--set is 'max_batch_size', allowed is NAME=VALUE"),
        (["--env", "=1"], "--env is '=1', allowed is NAME=VALUE"),
        (["--option", "max_bach_size=1"], "unknown option max_bach_size"),
        (["--canary-weight", "2"], "weight is '2.0', allowed is a number above 0"),
        (["--canary-weigth", "2"], "unknown flag --canary-weigth\nhint: did you mean --canary-weight?"),
    ],
)
def test_a_wrong_flag_is_refused_before_aws_is_asked(
    more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*more)) == 1
    assert f"kvreuse: error: {sentence}" in capsys.readouterr().err


def test_the_policy_is_printed_without_asking_aws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "toy", "--print-policy", "--role", "arn:aws-cn:iam::123456789012:role/r"]) == 0
    document = json.loads(capsys.readouterr().out)
    resources = [statement["Resource"] for statement in document["Statement"]]
    assert "arn:aws-cn:iam::123456789012:role/r" in resources
    assert "arn:aws-cn:sagemaker:*:*:endpoint/toy" in resources[0]


def test_the_page_lists_every_setting_as_it_is() -> None:
    rows = []
    for name, option in _SETTINGS.items():
        default = "" if option.default is MISSING else f"`{option.shown(option.default)}`"
        flag = f"--{name.replace('_', '-')}"
        rows.append(f"| `{flag}` | {default} | {option.kind.allowed} | {option.doc} |")
    assert [line for line in DOC.read_text("utf-8").splitlines() if line.startswith("| `--")] == rows


def test_the_page_lists_every_alarm_and_query() -> None:
    text = DOC.read_text("utf-8")
    folder = Path(__file__).parents[2] / "src" / "kvreuse" / "ops" / "deploy"
    alarms = json.loads((folder / "alarms.json").read_text("utf-8"))
    rows = [line for line in text.partition("## Alarms")[2].splitlines() if line.startswith("| `")]
    assert [(row.split("`")[1], row.endswith("yes |")) for row in rows] == [
        (name, alarm["rolls_back"]) for name, alarm in alarms.items()
    ]
    flat = " ".join(text.split())
    assert [name for name in json.loads((folder / "queries.json").read_text("utf-8")) if name not in flat] == []
