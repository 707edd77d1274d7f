"""What a start on GPUs says about them: driver, CUDA, NCCL and the devices.

Knows devices and versions. Knows nothing of models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["driver_version", "log_gpus", "nccl_doubt"]

log = logging.getLogger("kvreuse.engine")

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_MIN_NCCL = (2, 18)


def log_gpus(devices: Sequence[torch.device]) -> None:
    """One line about the GPUs among `devices`, and a warning where NCCL is too old for them. Nothing without a GPU."""
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    log.info(
        "driver %s, CUDA %s, NCCL %s, %s",
        driver_version(_DRIVER_FILE.read_text(encoding="utf-8")) if _DRIVER_FILE.exists() else "unknown",
        torch.version.cuda,
        _dotted(nccl) if nccl else "none",
        ", ".join(
            f"{gpu} {torch.cuda.get_device_name(gpu)} {_dotted(torch.cuda.get_device_capability(gpu))}" for gpu in gpus
        ),
    )
    doubt = nccl_doubt(nccl, num_devices=len(gpus))
    if doubt is not None:
        log.warning("%s", doubt)


def driver_version(text: str) -> str:
    """The version in the text that the NVIDIA kernel module shows of itself."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


def nccl_doubt(version: tuple[int | str, ...] | None, *, num_devices: int) -> str | None:
    """A sentence when NCCL is too old for several devices. version: as torch gives it, None: there is none."""
    if version is None or num_devices < 2 or version[:2] >= _MIN_NCCL:
        return None
    return f"NCCL {_dotted(version)} is older than {_dotted(_MIN_NCCL)}, with {num_devices} GPUs it should be newer"


def _dotted(version: Sequence[int | str]) -> str:
    return ".".join(map(str, version))
