"""Count the instructions of a compiled Triton kernel: what one thread executes inside and outside of loops.

A kernel's intermediate representation does not tell which tensor core instruction computes a product, how wide a load
is, how often threads exchange values through shared memory, or how many registers remain. Its PTX and the loaded kernel
do. Nothing is run to learn this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.gpu.devices import Device
from tilewise.gpu.pinning.work_features import CLOCK, RankedCandidate, log2

INNERMOST, OUTER, OUTSIDE = range(3)  # loops: where an instruction is
_LABEL = re.compile(r"(\$?\w+):")
_GUARD = re.compile(r"@!?%\w+\s+")
_PRODUCT_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_VECTOR, _ELEMENT = re.compile(r"\.v([248])\b"), re.compile(r"\.[bfus](8|16|32|64|128)\b")
_TRANSFERS = ("global_loads", "global_stores")
_EXECUTING_WARPS = {"products": 1, "group_products": 4}  # that execute an instruction together
_FLOAT_OPERATIONS = ("fma", "mul", "add", "sub", "max", "min", "neg", "abs")
_SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
# The kind of an instruction by the beginning of its name; the first that fits counts.
_KINDS = (
    ("ld.global", "global_loads"), ("st.global", "global_stores"), ("cp.async.bulk", "bulk_copies"),
    ("cp.async.c", "async_copies"), ("ld.shared", "shared_loads"), ("st.shared", "shared_stores"),
    ("ldmatrix", "matrix_loads"), ("stmatrix", "matrix_stores"), ("mma", "products"), ("wgmma.mma", "group_products"),
    ("wgmma", "group_waits"), ("div", "divisions"), ("shfl", "shuffles"), ("bar", "barriers"), ("mbarrier", "barriers"),
    ("fence", "barriers"), ("atom", "atomics"), ("red", "atomics"), ("cvt", "conversions"), ("mov", "moves"),
    ("ld.", "moves"), ("bra", "control"), ("ret", "control"), ("setp", "control"), ("selp", "control"),
)  # fmt: skip


@dataclass(frozen=True)
class MachineWork:
    """The resources of a compiled kernel, and the instructions of a thread by kind: (innermost loops, outer, outside).

    `counts` also has bytes of loads and stores and operations of products.
    """

    registers: int
    spills: int
    shared_bytes: int
    layout_conversions: int
    loop_depth: int
    counts: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    def executed(self, kind: str, trips: float) -> float:
        """Return how often a thread executes instructions of a kind, given the iterations of the innermost loops."""
        innermost, outer, outside = self.counts.get(kind, (0.0, 0.0, 0.0))
        # The iterations of outer loops are unknown: take the square root of all.
        return innermost * trips + outer * math.sqrt(trips) + outside


def describe_compiled(kernel: Any) -> MachineWork:
    """Describe a kernel that Triton has compiled and loaded."""
    return read_machine_work(
        kernel.asm["ptx"],
        registers=int(kernel.n_regs or 0),
        spills=int(kernel.n_spills or 0),
        shared_bytes=int(kernel.metadata.shared),
        layout_conversions=str(kernel.asm["ttgir"]).count("ttg.convert_layout"),
    )


def read_machine_work(
    ptx: str, *, registers: int, spills: int, shared_bytes: int, layout_conversions: int
) -> MachineWork:
    """Count the instructions in a kernel's PTX; loops are the blocks between a label and a later jump to it."""
    blocks: list[list[str]] = [[]]
    position = {"": 0}
    jumps: list[tuple[int, str]] = []
    is_inside = False
    for line in map(str.strip, ptx.splitlines()):
        is_inside |= ".entry" in line
        if line.startswith(".section"):
            break
        label = _LABEL.match(line)
        if label is not None:
            position[label[1]] = len(blocks)
            blocks.append([])
        instruction = _GUARD.sub("", line.lstrip("{ "))
        if not is_inside or label is not None or not instruction[:1].isalpha():
            continue
        words = instruction.rstrip(";").split()
        blocks[-1].append(words[0].rstrip(";"))
        if words[0].startswith("bra"):
            jumps.append((len(blocks) - 1, words[-1]))
    depth = [0] * len(blocks)
    for first, last in sorted({(position[to], at) for at, to in jumps if position.get(to, at + 1) <= at}):
        for number in range(first, last + 1):
            depth[number] += 1
    deepest = max(depth)
    counts: dict[str, list[float]] = {}
    for level, instructions in zip(depth, blocks, strict=True):
        nesting = OUTSIDE if not level else INNERMOST if level == deepest else OUTER
        for instruction in instructions:
            for kind, amount in _amounts(instruction):
                counts.setdefault(kind, [0.0, 0.0, 0.0])[nesting] += amount
    by_kind = {kind: (a, b, c) for kind, (a, b, c) in counts.items()}
    return MachineWork(registers, spills, shared_bytes, layout_conversions, deepest, by_kind)


def _amounts(instruction: str) -> list[tuple[str, float]]:
    """Return what an instruction adds to which counts: itself, and its bytes or operations."""
    kind = _kind(instruction)
    amounts = [("instructions", 1.0), (kind, 1.0)]
    if kind in _TRANSFERS:
        vector, element = _VECTOR.search(instruction), _ELEMENT.search(instruction)
        size = (int(vector[1]) if vector else 1) * (int(element[1]) // 8 if element else 4)
        amounts.append((f"{kind}_bytes", float(size)))
    shape = _PRODUCT_SHAPE.search(instruction)
    if kind in _EXECUTING_WARPS and shape is not None:
        operations = 2.0 * int(shape[1]) * int(shape[2]) * int(shape[3])
        amounts.append((f"{kind}_operations", operations / _EXECUTING_WARPS[kind]))
    return amounts


def _kind(instruction: str) -> str:
    """Return the kind of an instruction, such as "global_loads"."""
    name, _, types = instruction.partition(".")
    if name in _SPECIAL:
        return "special"
    if name in _FLOAT_OPERATIONS and re.search(r"f(16|32)", types):
        return "float"
    return next((kind for start, kind in _KINDS if instruction.startswith(start)), "integer")


# Kinds whose executed number is a feature.
_FEATURE_KINDS = ("instructions", "global_loads", "global_stores", "shared_loads", "shared_stores", "matrix_loads",
                  "products", "group_products", "barriers", "shuffles", "special", "integer", "float", "conversions",
                  "async_copies", "atomics")  # fmt: skip
# Rates of the analytic terms, of a multiprocessor in a cycle; the trees correct them within a factor of a few.
_ISSUED_WARPS, _SPECIAL_LANES, _MEMORY_LANES = 4.0, 16.0, 32.0
_PRODUCT_OPERATIONS, _GROUP_OPERATIONS = 4096.0, 8192.0  # of 16-bit numbers
_BARRIER_SECONDS, _SHUFFLE_SECONDS, _ATOMIC_SECONDS = 30e-9, 20e-9, 200e-9
_DEPENDENT_CYCLES = 4.0  # from an instruction to the next one that needs its result


def machine_features(
    candidates: Sequence[RankedCandidate], works: Sequence[MachineWork], device: Device
) -> npt.NDArray[np.float64]:
    """Return the trees' further features of compiled kernels, one row per candidate."""
    warps, programs, trips = (
        np.array(values, np.float64)
        for values in zip(*((c.warps, c.programs, c.work.trips or 1.0) for c in candidates), strict=True)
    )
    registers, spills, shared, conversions, depth = (
        np.array(values, np.float64)
        for values in zip(*((w.registers, w.spills, w.shared_bytes, w.layout_conversions, w.loop_depth) for w in works),
                          strict=True)
    )  # fmt: skip

    def executed(*kinds: str) -> npt.NDArray[np.float64]:
        """Count the executed instructions of these kinds, for each candidate."""
        return np.array([sum(w.executed(k, t) for k in kinds) for w, t in zip(works, trips, strict=True)])

    architecture, sms = device.architecture, device.multiprocessors
    allocated = np.ceil(np.maximum(registers, 32) / 8) * 8  # registers are given out in eights
    limits = (
        architecture.registers_per_multiprocessor // (allocated * 32 * warps),
        architecture.shared_bytes_per_multiprocessor // (shared + 1024),
        architecture.max_warps // warps,
    )
    resident = np.clip(np.minimum.reduce(limits), 1, architecture.max_blocks)
    waves = programs / (sms * resident)
    rounds = np.ceil(waves)
    per_multiprocessor = programs / sms  # programs
    warp_cycles = per_multiprocessor * warps / CLOCK / (waves / rounds)
    memory = executed("global_loads", "global_stores", "shared_loads", "shared_stores", "async_copies")
    memory += 4 * executed("matrix_loads", "matrix_stores")  # each moves four times the bytes of a plain load
    terms = (
        warp_cycles * (executed("instructions") + 8 * executed("divisions")) / _ISSUED_WARPS,
        warp_cycles * (executed("special") + 2 * executed("divisions")) * 32 / _SPECIAL_LANES,
        warp_cycles * memory * 32 / _MEMORY_LANES,
        warp_cycles * executed("products_operations") / _PRODUCT_OPERATIONS,
        warp_cycles * executed("group_products_operations") / _GROUP_OPERATIONS,
        rounds * (executed("barriers") * np.log2(warps + 1) * _BARRIER_SECONDS
                  + executed("shuffles", "group_waits") * _SHUFFLE_SECONDS + executed("atomics") * _ATOMIC_SECONDS),
        rounds * executed("instructions") * _DEPENDENT_CYCLES / CLOCK,
    )  # fmt: skip
    active = np.maximum(np.minimum(per_multiprocessor, resident) * warps / 4, 1)  # warps of a scheduler
    widths = [
        executed(f"{kind}_bytes") / np.maximum(executed(kind), 1e-9) for kind in ("global_loads", "global_stores")
    ]
    columns = [
        log2(registers), spills, log2(shared + 1), resident, log2(waves), waves / rounds, log2(active),
        *(log2(width + 0.1) for width in widths), *(log2(term * 1e9) for term in terms),
        log2(np.maximum.reduce(terms) * 1e9), *(log2(executed(kind) + 0.1) for kind in _FEATURE_KINDS),
        conversions, depth,
    ]  # fmt: skip
    return np.stack(columns, axis=1)
