"""Which attention backend a start uses: the one that was asked for, or the fastest that fits model, device and machine.

Knows the backends. Knows nothing of models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvreuse.engine.attention.cpu import CPUBackend
from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.self_test import choose_cuda, fault
from kvreuse.engine.attention.step import Backend
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout

__all__ = ["choose_backend"]

log = logging.getLogger("kvreuse.engine")

Choice = Callable[[KVLayout], Backend | str]


def choose_backend(name: str, layout: KVLayout) -> Backend:
    """name: a value of option.attention_backend. Raises ConfigError when the one asked for does not fit."""
    if name == "reference":
        return ReferenceBackend()
    kinds = {device.type for device in layout.devices}
    choices = _choices(*kinds) if len(kinds) == 1 else {}
    if name == "auto":
        choices.pop("cuda-gather", None)  # the choice of cuda includes it
    else:
        choices = {name: choices.get(name, lambda _: f"the model is on {' and '.join(sorted(kinds))}")}
    for candidate, choose in choices.items():
        found = choose(layout)
        if not isinstance(found, str):
            return found
        if name != "auto":
            raise ConfigError(f"option.attention_backend is {name}, but {found}\nhint: auto takes the best that fits")
        log.warning("attention backend %s is not used: %s", candidate, found)
    log.warning("attention is computed by the reference, which is slow, on %s", " and ".join(sorted(kinds)))
    return ReferenceBackend()


def _choices(kind: str) -> dict[str, Choice]:
    """The backends of a kind of device, best first."""
    if kind == "cuda":
        return {"cuda": choose_cuda, "cuda-gather": lambda layout: choose_cuda(layout, is_gathering=True)}
    return {"cpu": _native, "cpu-torch": CPUBackend.for_layout}


def _native(layout: KVLayout) -> Backend | str:
    backend = NativeBackend.for_layout(layout)
    if isinstance(backend, str):
        return backend
    reason = fault(backend, layout)
    return backend if reason is None else f"the trial failed: {reason}"
