"""The configuration: sources and their precedence, every refusal, and what is logged of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvreuse.config import OPTIONS, Config, Option, load_config
from kvreuse.config.kinds import integer, text
from kvreuse.config.names import DJL_ONLY
from kvreuse.errors import ConfigError

ROOT = Path(__file__).parents[1]


def properties(folder: Path, content: str) -> Path:
    path = folder / "serving.properties"
    path.write_text(content, encoding="utf-8")
    return path


def load(*, flags: dict[str, str] | None = None, env: dict[str, str] | None = None, path: Path | None = None) -> Config:
    return load_config(flags, env or {}, path)


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return caught.value.message


# --- sources and precedence


def test_without_any_source_every_option_has_its_default() -> None:
    assert load() == Config()
    assert {name: getattr(Config(), name) for name in OPTIONS} == {name: o.default for name, o in OPTIONS.items()}


def test_the_defaults_are_the_promised_ones() -> None:
    config = Config()
    assert (config.model_id, config.port, config.kv_cache_reuse) == ("/opt/ml/model", 8080, True)
    assert (config.kv_cache_memory_ratio, config.kv_cache_block_size) == (0.4, 32)
    assert (config.kv_cache_policy, config.kv_cache_lru_weights) == ("size_weighted_lru", (0.3, 0.7))
    assert (config.kv_cache_ttl_s, config.kv_cache_defrag_interval) == (14400, 300)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [((), 64), (("file",), 2), (("file", "env"), 3), (("file", "env", "flag"), 4), (("file", "flag"), 4)],
)
def test_flags_win_over_environment_over_file_over_default(
    tmp_path: Path, sources: tuple[str, ...], expected: int
) -> None:
    config = load(
        path=properties(tmp_path, "option.max_batch_size=2" if "file" in sources else ""),
        env={"OPTION_MAX_BATCH_SIZE": "3"} if "env" in sources else {},
        flags={"max_batch_size": "4"} if "flag" in sources else {},
    )
    assert config.max_batch_size == expected


def test_a_platform_variable_wins_over_option_variable() -> None:
    config = load(env={"OPTION_PORT": "9000", "SAGEMAKER_BIND_TO_PORT": "9001"})
    assert (config.port, config.sources["port"]) == (9001, "environment SAGEMAKER_BIND_TO_PORT")


def test_sagemaker_program_names_the_handler() -> None:
    assert load(env={"SAGEMAKER_PROGRAM": "handler.py"}).entry_point == "handler.py"


def test_variables_of_others_are_left_alone() -> None:
    assert load(env={"SAGEMAKER_REGION": "eu-west-1", "MY_OPTION_X": "1", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize("flag", ["max_batch_size", "max-batch-size", "option.max_batch_size"])
def test_a_flag_may_be_spelled_three_ways(flag: str) -> None:
    assert load(flags={flag: "8"}).max_batch_size == 8


@pytest.mark.parametrize("key", ["option.entryPoint", "option.entry_point"])
def test_entry_point_may_be_spelled_as_djl_does(tmp_path: Path, key: str) -> None:
    assert load(path=properties(tmp_path, f"{key}=mine.py")).entry_point == "mine.py"


@pytest.mark.parametrize("variable", ["OPTION_ENTRYPOINT", "OPTION_ENTRY_POINT"])
def test_entry_point_variable_may_be_spelled_as_djl_does(variable: str) -> None:
    assert load(env={variable: "mine.py"}).entry_point == "mine.py"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_default_can_be_written_and_read_back(tmp_path: Path, name: str) -> None:
    option = OPTIONS[name]
    written = option.shown(option.default)
    path = properties(tmp_path, f"{option.key}={written}")
    for config in (load(path=path), load(env={f"OPTION_{name.upper()}": written}), load(flags={name: written})):
        assert getattr(config, name) == option.default
        assert name in config.sources


def test_the_environment_is_the_process_s_own_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_MAX_QUEUE", "7")
    assert load_config().max_queue == 7


def test_the_shipped_properties_file_holds_the_defaults() -> None:
    assert load(path=ROOT / "serving.properties") == Config()


# --- values


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("dtype", "fp16", "float16"),
        ("dtype", "BFLOAT16", "bfloat16"),
        ("kv_cache_reuse", "False", False),
        ("kv_cache_memory_bytes", "512MiB", 512 * 2**20),
        ("kv_cache_memory_bytes", "1.5 gb", 1_500_000_000),
        ("kv_cache_memory_bytes", "8388608", 8388608),
        ("kv_cache_memory_bytes", "auto", None),
        ("kv_cache_lru_weights", "1, 0", (1.0, 0.0)),
        ("kv_cache_memory_ratio", " 0.95 ", 0.95),
        ("max_model_len", "auto", None),
        ("max_queue", "0", 0),
    ],
)
def test_a_value_is_read_in_each_of_its_forms(name: str, raw: str, expected: object) -> None:
    assert getattr(load(flags={name: raw}), name) == expected


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("engine", "MPI"),
        ("dtype", "int8"),
        ("port", "65536"),
        ("port", "-1"),
        ("port", "80.0"),
        ("kv_cache_reuse", "yes"),
        ("kv_cache_memory_ratio", "0"),
        ("kv_cache_memory_ratio", "0.96"),
        ("kv_cache_memory_ratio", "nan"),
        ("kv_cache_ttl_s", "inf"),
        ("kv_cache_block_size", "0"),
        ("kv_cache_block_size", "1025"),
        ("kv_cache_block_size", "9" * 5000),
        ("kv_cache_lru_weights", "0.3"),
        ("kv_cache_lru_weights", "0,0"),
        ("kv_cache_lru_weights", "-1,2"),
        ("kv_cache_lru_weights", "inf,1"),
        ("kv_cache_memory_bytes", "12 parsecs"),
        ("kv_cache_memory_bytes", "1KiB"),
        ("kv_cache_memory_bytes", "-5MiB"),
        ("max_model_len", "none"),
        ("model_id", ""),
        ("model_id", "  "),
    ],
)
def test_a_bad_value_is_refused_naming_option_value_range_and_source(name: str, raw: str) -> None:
    option = OPTIONS[name]
    message = refusal(env={f"OPTION_{name.upper()}": raw})
    assert message.startswith(f"{option.key} is '{raw.strip()}', allowed is {option.kind.allowed}\n")
    assert f"set by environment OPTION_{name.upper()}" in message


def test_a_value_given_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"option.kv_cache_block_size is '0', allowed is an integer from 1 to 1024"):
        Config(kv_cache_block_size=0)


@pytest.mark.parametrize("wrong", [True, 1.5, "8"])
def test_a_value_of_another_type_given_in_code_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^option\.max_batch_size is"):
        Config(max_batch_size=wrong)


def test_a_step_must_have_a_token_for_every_sequence() -> None:
    assert "at least option.max_batch_size (64)" in refusal(flags={"max_batch_tokens": "63"})


def test_a_group_cannot_be_larger_than_a_batch() -> None:
    assert "at most option.max_batch_size (4)" in refusal(flags={"group_min_size": "5", "max_batch_size": "4"})


# --- unknown names


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("option.max_bach_size", "option.max_batch_size"),
        ("option.kv_cache_ttl", "option.kv_cache_ttl_s"),
        ("option.entrypoint", "option.entryPoint"),
        ("model_id", "option.model_id"),
        ("Engine", "engine"),
    ],
)
def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path, key: str, suggestion: str) -> None:
    message = refusal(path=properties(tmp_path, f"{key}=1"))
    assert message == f"unknown option {key}\nhint: did you mean {suggestion}?"


def test_an_unknown_option_variable_names_the_nearest() -> None:
    message = refusal(env={"OPTION_MAX_BACH_SIZE": "1"})
    assert message == "unknown environment variable OPTION_MAX_BACH_SIZE\nhint: did you mean OPTION_MAX_BATCH_SIZE?"


def test_an_unknown_flag_names_the_nearest() -> None:
    message = refusal(flags={"max-bach-size": "1"})
    assert message == "unknown flag --max-bach-size\nhint: did you mean --max-batch-size?"


def test_an_unknown_name_like_no_other_says_where_to_look() -> None:
    assert refusal(flags={"zzzz": "1"}) == "unknown flag --zzzz\nhint: kvreuse serve --help lists what is known"


def test_settings_of_djl_serving_are_ignored_and_reported(tmp_path: Path) -> None:
    config = load(path=properties(tmp_path, "".join(f"{key}=1\n" for key in sorted(DJL_ONLY))))
    assert config == Config()
    assert config.effective()[len(OPTIONS) :] == [
        f"{key}=1 ignored (a setting of DJL Serving only)" for key in sorted(DJL_ONLY)
    ]


# --- the file


def test_a_missing_file_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    assert refusal(path=tmp_path / "absent").startswith(f"cannot read {tmp_path / 'absent'}: No such file")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    path.write_bytes(b"option.model_id=caf\xe9")
    assert refusal(path=path) == f"cannot read {path}: it is not UTF-8 at byte 19"


def test_a_key_given_twice_is_refused_naming_both_lines(tmp_path: Path) -> None:
    path = properties(tmp_path, "option.port=1\n# between\noption.port=2\n")
    assert refusal(path=path) == f"option.port is given twice, on lines 1 and 3 of {path}"


def test_an_option_given_under_two_spellings_is_refused(tmp_path: Path) -> None:
    message = refusal(path=properties(tmp_path, "option.entryPoint=a.py\noption.entry_point=b.py\n"))
    assert message.startswith("option.entry_point is given twice, under two spellings")


# --- what is derived and what is shown


def test_limits_are_derived_from_the_batch_and_the_devices() -> None:
    config = Config(max_batch_size=8)
    assert (config.concurrency(num_devices=2), config.queue_limit(num_devices=2)) == (16, 64)


def test_limits_that_are_set_are_kept() -> None:
    config = Config(max_concurrency=3, max_queue=0)
    assert (config.concurrency(num_devices=2), config.queue_limit(num_devices=2)) == (3, 0)


def test_the_effective_configuration_says_where_each_value_came_from(tmp_path: Path) -> None:
    path = properties(tmp_path, "option.kv_cache_reuse=false")
    lines = load(path=path, env={"OPTION_DTYPE": "bf16"}, flags={"port": "81"}).effective()
    assert f"option.kv_cache_reuse=false (file {path})" in lines
    assert "option.dtype=bfloat16 (environment OPTION_DTYPE)" in lines
    assert "option.port=81 (flag --port)" in lines
    assert "option.kv_cache_ttl_s=14400 (default)" in lines
    assert "option.max_queue=auto (default)" in lines
    assert len(lines) == len(OPTIONS)


def test_a_secret_is_never_shown() -> None:
    option = Option(key="option.token", kind=text("a token"), doc="", secret=True)
    assert option.shown("hunter2") == "********"
    with pytest.raises(ConfigError, match=r"^option.token is \*{8}, allowed"):
        dataclasses.replace(option, kind=integer(1, 2)).check("hunter2")


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]
