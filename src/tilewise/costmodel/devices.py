"""Record of the H200, on which the shipped models were trained; `tilewise.gpu.devices` has those of other GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.costmodel.architecture import MIB, SM_90, Architecture

DATA_SHEET = "vendor data sheet"


@dataclass(frozen=True)
class SustainedRates:
    """Rates that kernels reach in practice, measured by us; the runtime model's analytic costs are built on them."""

    tensor_flops: float  # 16-bit multiply-adds count twice; at the clocks and the power of a long run
    memory_bandwidth: float  # bytes per second
    l2_bandwidth: float  # bytes per second
    launch_seconds: float  # launch latency that nothing hides
    empty_kernel_seconds: float  # runtime of a kernel that does next to nothing


@dataclass(frozen=True)
class Device:
    """One GPU model. Fields that no reliable source gives are None or missing from `tensor_flops`."""

    name: str
    patterns: tuple[str, ...]  # words that the driver's name contains; any of them identifies the device
    architecture: Architecture
    multiprocessors: int
    l2_bytes: int | None
    memory_bandwidth: float  # bytes per second, peak
    tensor_flops: Mapping[str, float] = field(default_factory=dict)  # peak per second by dtype, without sparsity
    sustained: SustainedRates | None = None
    source: str = DATA_SHEET

    @property
    def shared_bytes_per_block(self) -> int:
        return self.architecture.shared_bytes_per_block


H200 = Device(
    name="NVIDIA H200",
    patterns=("h200",),
    architecture=SM_90,
    multiprocessors=132,
    l2_bytes=60 * MIB,  # as the driver reports it; the data sheet does not say
    memory_bandwidth=4.8e12,
    tensor_flops={"tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "fp8": 1979e12, "int8": 1979e12},
    sustained=SustainedRates(
        tensor_flops=8.0e14,
        memory_bandwidth=4.3e12,
        l2_bandwidth=7.0e12,
        launch_seconds=2.0e-6,
        empty_kernel_seconds=1.5e-6,
    ),
)
