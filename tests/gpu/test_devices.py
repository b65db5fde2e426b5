"""Device records: names that drivers report, consistency, and no GPU constant in any other module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewise.gpu.devices import ARCHITECTURES, DEVICES, H200, find_device, model_collection, shared_bytes_of

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA_A100-SXM4-40GB", "NVIDIA A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA_H20-3e", "NVIDIA H20-3e"),
        ("AMD_Instinct_MI325_OAM", "AMD Instinct MI325X"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA_L20Y", "NVIDIA L20Y"),
        ("AMD_Instinct_MI308X", "AMD Instinct MI308X"),
        ("Intel(R)_Arc(TM)_Pro_B70_Graphics", "Intel Arc Pro B70"),
    ],
)
def test_a_device_is_found_by_the_name_its_driver_reports(reported: str, name: str) -> None:
    device = find_device(reported)
    assert device is not None and device.name == name


def test_an_unknown_gpu_has_no_record() -> None:
    assert find_device("Some GPU 9000") is None


def test_records_are_unique_and_consistent() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert find_device(device.name) is device or find_device(device.patterns[0]) is device
        assert device.multiprocessors > 0 and device.memory_bandwidth > 1e11
        assert all(rate > 1e13 for rate in device.tensor_flops.values())
    for architecture in ARCHITECTURES.values():
        assert architecture.shared_bytes_per_block <= architecture.shared_bytes_per_multiprocessor


def test_an_unknown_compute_capability_gets_the_smallest_shared_memory_and_no_model() -> None:
    assert shared_bytes_of(90) == H200.shared_bytes_per_block == 232_448
    assert shared_bytes_of(52) == 65_536
    assert model_collection(90) == "h200" and model_collection(52) is None


def test_no_other_module_contains_a_gpu_constant() -> None:
    constants = re.compile(r"\b(232_?448|227 ?\* ?1024|101_?376|166_?912)\b|\b4\.3e12\b|multiprocessors\"?, 132\b")
    sources = [*(_ROOT / "src").rglob("*.py"), *(_ROOT / "packages").rglob("*.py"), *(_ROOT / "tools").rglob("*.py")]
    offenders = [path for path in sources if path.name != "devices.py" and constants.search(path.read_text())]
    assert not offenders
