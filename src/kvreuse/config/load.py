"""Brings the sources together: flags win over the environment, over serving.properties, over the defaults.

The only reader of the process environment. (DJL Serving lets the file win over OPTION_* variables; here a deployment
can always override the file that was packed with the model.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvreuse.config.names import DJL_ONLY, ENV_NAMES, FILE_KEYS, FLAG_NAMES, unknown
from kvreuse.config.options import DEFAULT_MODEL_DIR, OPTIONS, Config
from kvreuse.config.properties import parse_properties
from kvreuse.errors import ConfigError

__all__ = ["load_config", "set_torch_defaults", "user_cache_dir"]

_DEFAULT_PROPERTIES = Path(DEFAULT_MODEL_DIR, "serving.properties")
_Given = dict[str, tuple[str, str]]  # option -> (text, where it was set)


def load_config(
    argv_overrides: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    properties_path: Path | None = None,
) -> Config:
    """Read all sources and check them.

    argv_overrides: flag name without dashes (max_batch_size, max-batch-size or option.max_batch_size) -> text.
    env: os.environ when None. properties_path: the model folder's serving.properties, if there is one, when None.

    Raises ConfigError: an unknown name (it names the nearest known one), a bad value (it names the option, the value,
    what is allowed and where it was set), an unreadable file.
    """
    file_given, ignored = _from_file(properties_path)
    given = file_given | _from_env(os.environ if env is None else env) | _from_flags(argv_overrides or {})
    values = {name: OPTIONS[name].kind.read(raw.strip()) for name, (raw, _) in given.items()}
    for name, (raw, source) in given.items():
        OPTIONS[name].check(values[name], shown_as=raw.strip(), source=source)
    return Config(**values, sources={name: source for name, (_, source) in given.items()}, ignored=ignored)


def _from_file(path: Path | None) -> tuple[_Given, tuple[str, ...]]:
    if path is None:
        if not _DEFAULT_PROPERTIES.is_file():
            return {}, ()
        path = _DEFAULT_PROPERTIES
    try:
        pairs = parse_properties(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 at byte {error.start}") from error
    except ConfigError as error:
        raise ConfigError(f"{error.message} of {path}") from error
    given: _Given = {}
    for key, raw in pairs.items():
        if key in DJL_ONLY:
            continue
        if key not in FILE_KEYS:
            raise unknown("option", key, FILE_KEYS)
        if FILE_KEYS[key] in given:
            raise ConfigError(f"{key} is given twice, under two spellings, in {path}")
        given[FILE_KEYS[key]] = (raw, f"file {path}")
    return given, tuple(f"{key}={raw}" for key, raw in pairs.items() if key in DJL_ONLY)


def _from_env(env: Mapping[str, str]) -> _Given:
    for variable in env:
        if variable.startswith("OPTION_") and variable not in ENV_NAMES:
            raise unknown("environment variable", variable, ENV_NAMES)
    found = {variable: name for variable, name in ENV_NAMES.items() if variable in env}
    return {name: (env[variable], f"environment {variable}") for variable, name in found.items()}


def _from_flags(flags: Mapping[str, str]) -> _Given:
    for flag in flags:
        if flag not in FLAG_NAMES:
            raise unknown("flag", f"--{flag}", (f"--{known}" for known in FLAG_NAMES))
    return {FLAG_NAMES[flag]: (raw, f"flag --{flag}") for flag, raw in flags.items()}


def user_cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where files that can be made again are kept: $XDG_CACHE_HOME/kvreuse or ~/.cache/kvreuse. Not created.

    Raises ConfigError for a user without a home.
    """
    base = (os.environ if env is None else env).get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "kvreuse"
    try:
        return Path.home() / ".cache" / "kvreuse"
    except RuntimeError as error:
        raise ConfigError("the user has no home folder\nhint: set XDG_CACHE_HOME") from error


def set_torch_defaults() -> None:
    """Make idle OpenMP threads sleep and large tensors lie in large pages. What the user has set stays.

    Spinning threads take the cores from each other on a busy machine: a token then takes 10 to 50 times longer. With
    small pages a step on the CPU takes 1 to 6 % longer. Must run before torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
