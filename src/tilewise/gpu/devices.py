"""Records of the GPUs that tilewise knows. Adding a GPU means adding a record here.

Numbers come from the makers' data sheets and, for the limits of an architecture, from the CUDA programming guide and
AMD's instruction-set manuals. Peak rates are those of dense matrices. A value that no such source states is left out.

>>> find_device("NVIDIA A100-SXM4-80GB").multiprocessors
108
"""

from __future__ import annotations

import re

from tilewise.costmodel.architecture import KIB, MIB, SM_90, Architecture
from tilewise.costmodel.devices import DATA_SHEET, H200, Device, SustainedRates

__all__ = ["ARCHITECTURES", "DEVICES", "H200", "H200_CAPABILITY", "NEAREST_COLLECTION", "Architecture", "Device",
           "SustainedRates", "find_device", "model_collection", "shared_bytes_of"]  # fmt: skip

H200_CAPABILITY = 90  # compute capability 9.0, the target of compilations without a GPU

# fmt: off
#            name        shared memory per block, multiprocessor  registers  warps, blocks resident
ARCHITECTURES = {architecture.name: architecture for architecture in (
    Architecture("sm_70", 96 * KIB, 96 * KIB, 65_536, 64, 32),
    Architecture("sm_75", 64 * KIB, 64 * KIB, 65_536, 32, 16),
    Architecture("sm_80", 163 * KIB, 164 * KIB, 65_536, 64, 32),
    Architecture("sm_86", 99 * KIB, 100 * KIB, 65_536, 48, 16),
    Architecture("sm_87", 163 * KIB, 164 * KIB, 65_536, 48, 16),
    Architecture("sm_89", 99 * KIB, 100 * KIB, 65_536, 48, 24),
    SM_90,
    Architecture("sm_100", 227 * KIB, 228 * KIB, 65_536, 64, 32),
    Architecture("sm_103", 227 * KIB, 228 * KIB, 65_536, 64, 32),
    Architecture("sm_120", 99 * KIB, 100 * KIB, 65_536, 48, 24),
    Architecture("sm_121", 99 * KIB, 100 * KIB, 65_536, 48, 24),
    # AMD, per compute unit; warps are wavefronts, of 64 lanes on CDNA and 32 on RDNA. Source: LLVM's AMDGPU back end.
    Architecture("gfx942", 64 * KIB, 64 * KIB, 131_072, 32, 16),
    Architecture("gfx950", 160 * KIB, 160 * KIB, 131_072, 32, 16),
    Architecture("gfx1151", 64 * KIB, 64 * KIB, 98_304, 32, 16),
    Architecture("gfx1201", 64 * KIB, 64 * KIB, 98_304, 32, 16),
    # Intel, per Xe core: 8 vector engines with 8 threads of 128 registers of 64 bytes. Source: oneAPI GPU guide.
    Architecture("xe2", 128 * KIB, 128 * KIB, 131_072, 64, 64),
)}
# fmt: on


def _device(
    name: str,
    patterns: str,
    architecture: str,
    *,
    sms: int,
    l2_mib: int | None,
    gb_per_second: float,
    teraflops: dict[str, float] | None = None,
    source: str = DATA_SHEET,
) -> Device:
    """Build a record from the units of data sheets; `patterns` are separated by commas."""
    return Device(
        name=name,
        patterns=tuple(pattern.strip() for pattern in patterns.split(",")),
        architecture=ARCHITECTURES[architecture],
        multiprocessors=sms,
        l2_bytes=None if l2_mib is None else l2_mib * MIB,
        memory_bandwidth=gb_per_second * 1e9,
        tensor_flops={dtype: rate * 1e12 for dtype, rate in (teraflops or {}).items()},
        source=source,
    )


def _rates(
    half: float, *, tf32: float | None = None, fp8: float | None = None, int8: float | None = None
) -> dict[str, float]:
    """Return tensor-core rates in TFLOP/s by dtype; `half` applies to both fp16 and bf16."""
    rates = {"fp16": half, "bf16": half, "tf32": tf32, "fp8": fp8, "int8": int8}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_AMPERE = _rates(312, tf32=156, int8=624)
_HOPPER = _rates(989, tf32=495, fp8=1979, int8=1979)
_H20 = _rates(148, tf32=74, fp8=296, int8=296)
_MI300 = _rates(1307, tf32=654, fp8=2615, int8=2615)

# fmt: off
DEVICES = (
    H200,
    _device("NVIDIA A100 40GB", "a100", "sm_80", sms=108, l2_mib=40, gb_per_second=1555, teraflops=_AMPERE),
    _device("NVIDIA A100 80GB", "a100 80gb", "sm_80", sms=108, l2_mib=40, gb_per_second=2039, teraflops=_AMPERE),
    _device("NVIDIA A800 80GB", "a800", "sm_80", sms=108, l2_mib=40, gb_per_second=2039, teraflops=_AMPERE),
    _device("NVIDIA H100 SXM", "h100", "sm_90", sms=132, l2_mib=50, gb_per_second=3350, teraflops=_HOPPER),
    _device("NVIDIA H100 PCIe", "h100 pcie", "sm_90", sms=114, l2_mib=50, gb_per_second=2039,
            teraflops=_rates(756, tf32=378, fp8=1513, int8=1513)),
    _device("NVIDIA H800 SXM", "h800", "sm_90", sms=132, l2_mib=50, gb_per_second=3350, teraflops=_HOPPER),
    _device("NVIDIA H20", "h20", "sm_90", sms=78, l2_mib=60, gb_per_second=4000, teraflops=_H20),
    _device("NVIDIA H20-3e", "h20 3e", "sm_90", sms=78, l2_mib=60, gb_per_second=4800, teraflops=_H20),
    _device("NVIDIA B200", "b200", "sm_100", sms=148, l2_mib=126, gb_per_second=8000,
            teraflops=_rates(2250, tf32=1125, fp8=4500, int8=4500)),
    _device("NVIDIA GB200", "gb200", "sm_100", sms=152, l2_mib=126, gb_per_second=8000,
            teraflops=_rates(2500, tf32=1250, fp8=5000, int8=5000)),
    _device("NVIDIA B300", "b300", "sm_103", sms=148, l2_mib=None, gb_per_second=8000,
            teraflops=_rates(2250, tf32=1125, fp8=4500)),
    _device("NVIDIA GB10", "gb10", "sm_121", sms=48, l2_mib=24, gb_per_second=273),
    _device("NVIDIA L20", "l20", "sm_89", sms=92, l2_mib=96, gb_per_second=864,
            teraflops=_rates(119.5, tf32=59.8, fp8=239, int8=239)),
    _device("NVIDIA L20Y", "l20y", "sm_90", sms=132, l2_mib=50, gb_per_second=3350, teraflops=_HOPPER,
            source="no data sheet: tuned files need more shared memory than an L20 has; figures of an H100"),
    _device("NVIDIA L40S", "l40s", "sm_89", sms=142, l2_mib=96, gb_per_second=864,
            teraflops=_rates(362, tf32=183, fp8=733, int8=733)),
    _device("NVIDIA GeForce RTX 4090", "rtx 4090", "sm_89", sms=128, l2_mib=72, gb_per_second=1008,
            teraflops=_rates(165.2, tf32=82.6, fp8=330.3, int8=660.6)),
    _device("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx pro 6000 blackwell workstation", "sm_120",
            sms=188, l2_mib=128, gb_per_second=1792, teraflops=_rates(503.8, tf32=251.9, fp8=1007.6, int8=1007.6)),
    _device("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx pro 6000 blackwell server", "sm_120",
            sms=188, l2_mib=128, gb_per_second=1597),
    _device("AMD Instinct MI300X", "mi300x", "gfx942", sms=304, l2_mib=32, gb_per_second=5300, teraflops=_MI300),
    _device("AMD Instinct MI308X", "mi308x", "gfx942", sms=80, l2_mib=None, gb_per_second=5300),
    _device("AMD Instinct MI325X", "mi325x, mi325", "gfx942", sms=304, l2_mib=32, gb_per_second=6000, teraflops=_MI300),
    _device("AMD Instinct MI350X", "mi350x, mi350", "gfx950", sms=256, l2_mib=32, gb_per_second=8000,
            teraflops=_rates(2307, fp8=4614, int8=4614)),
    _device("AMD Instinct MI355X", "mi355x, mi355", "gfx950", sms=256, l2_mib=32, gb_per_second=8000,
            teraflops=_rates(2517, fp8=5033, int8=5033)),
    _device("AMD Radeon AI PRO R9700", "r9700", "gfx1201", sms=64, l2_mib=8, gb_per_second=640,
            teraflops=_rates(191, fp8=383, int8=383)),
    _device("AMD Radeon 8060S", "8060s", "gfx1151", sms=40, l2_mib=2, gb_per_second=256),
    _device("Intel Arc Pro B70", "arc pro b70", "xe2", sms=32, l2_mib=None, gb_per_second=608,
            teraflops=_rates(183.5, int8=367)),
)
# fmt: on

# Of the 255 registers of a thread, more than these spill beside addresses and operands.
_MAX_ACCUMULATORS = 200
# Collections that a model is shipped for, by the architecture they were measured on.
_COLLECTIONS = {SM_90.name: "h200"}
# The collection whose model serves all other GPUs; it ranks the products of an A100 nearly as well.
NEAREST_COLLECTION = "h200"


def find_device(name: str) -> Device | None:
    """Return the record of a GPU by the name that its driver reports; None if there is none.

    The record with the most words in common wins: "NVIDIA H100 PCIe" is not an SXM card.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    matches = [
        (len(pattern.split()), device)
        for device in DEVICES
        for pattern in device.patterns
        if words.issuperset(pattern.split())
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def exceeds_limits(device: Device, shared_bytes: float, accumulators_per_thread: float) -> bool:
    """Tell whether a kernel needs more shared memory, or more registers for its sums, than a device has."""
    return shared_bytes > device.shared_bytes_per_block or accumulators_per_thread > _MAX_ACCUMULATORS


def shared_bytes_of(capability: int) -> int:
    """Return the shared memory per block in bytes of a compute capability (90: 9.0); the least for unknown ones."""
    architecture = ARCHITECTURES.get(f"sm_{capability}")
    if architecture is not None:
        return architecture.shared_bytes_per_block
    return min(a.shared_bytes_per_block for name, a in ARCHITECTURES.items() if name.startswith("sm_"))


def model_collection(capability: int) -> str | None:
    """Return the name of the collection whose model fits GPUs of a compute capability (90 for 9.0), or None."""
    return _COLLECTIONS.get(f"sm_{capability}")
