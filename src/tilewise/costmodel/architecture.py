"""Limits of a GPU architecture, as data; `devices` and `tilewise.gpu.devices` have the records of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
WARP_THREADS = 32  # of every NVIDIA GPU


@dataclass(frozen=True)
class Architecture:
    """Limits that all GPUs of an architecture share; "multiprocessor" includes AMD's compute units."""

    name: str  # as compilers name it: sm_90, gfx942
    shared_bytes_per_block: int  # maximum that a block may request
    shared_bytes_per_multiprocessor: int
    registers_per_multiprocessor: int  # of 32 bits
    max_warps: int  # resident on a multiprocessor
    max_blocks: int  # resident on a multiprocessor


# CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
SM_90 = Architecture("sm_90", 227 * KIB, 228 * KIB, 65_536, max_warps=64, max_blocks=32)
