"""What a start on GPUs says about them."""

import pytest
import torch

from kvreuse.engine.devices import driver_version, log_gpus, nccl_doubt


@pytest.mark.parametrize(
    ("version", "num_devices", "is_old"),
    [
        ((2, 17, 1), 2, True),
        ((2, 18, 0), 2, False),
        ((2, 27, 3, "rc1"), 8, False),
        ((1, 99, 0), 4, True),
        ((2, 17, 1), 1, False),
        (None, 2, False),
    ],
)
def test_an_old_nccl_is_doubted_with_several_devices(version, num_devices, is_old):
    assert (nccl_doubt(version, num_devices=num_devices) is not None) == is_old


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)", "580.65.06"),
        ("", "unknown"),
    ],
)
def test_the_driver_version_is_found(text, version):
    assert driver_version(text) == version


def test_without_a_gpu_nothing_is_said(caplog):
    caplog.set_level("INFO")
    log_gpus([torch.device("cpu")])
    assert not caplog.records
