"""Turns the spellings of an option into its field, and an unknown spelling into an error that helps.

Knows every accepted name. Knows nothing of values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from kvreuse.config.options import OPTIONS
from kvreuse.errors import ConfigError

__all__ = ["DJL_ONLY", "ENV_NAMES", "FILE_KEYS", "FLAG_NAMES", "unknown"]

# Settings of DJL Serving's own server and of its Python process: one file may serve both.
DJL_ONLY = frozenset({
    "batch_size", "cpu.maxWorkers", "cpu.minWorkers", "gpu.maxWorkers", "gpu.minWorkers", "job_queue_size",
    "load_on_devices", "log_model_metric", "log_request_metric", "maxWorkers", "max_batch_delay", "max_idle_time",
    "metrics_aggregation", "minWorkers", "option.async_mode", "option.model_loading_timeout", "option.predict_timeout",
})  # fmt: skip
# The field's name, and the key without its prefix where that differs (entryPoint).
_SPELLINGS = {name: sorted({name, option.key.removeprefix("option.")}) for name, option in OPTIONS.items()}
FILE_KEYS: Mapping[str, str] = {option.key: name for name, option in OPTIONS.items()} | {
    f"option.{name}": name for name, option in OPTIONS.items() if option.key != name
}
# Weakest first: a variable of the platform wins over OPTION_*.
ENV_NAMES: Mapping[str, str] = {
    f"OPTION_{spelling.upper()}": name for name, spellings in _SPELLINGS.items() for spelling in spellings
} | {variable: name for name, option in OPTIONS.items() for variable in reversed(option.env)}
FLAG_NAMES: Mapping[str, str] = {
    variant: name
    for name, spellings in _SPELLINGS.items()
    for spelling in spellings
    for variant in (spelling, spelling.replace("_", "-"), f"option.{spelling}")
}


def unknown(what: str, name: str, known: Iterable[str], *, help_command: str = "kvreuse serve --help") -> ConfigError:
    """The error for a name that is not known; its hint line names the nearest known one, or where to find them all."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    likely = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[likely[0]]}?" if likely else f"{help_command} lists what is known"
    return ConfigError(f"unknown {what} {name}\nhint: {hint}")
