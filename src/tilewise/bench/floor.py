"""No entry is faster than its own arithmetic on this machine.

Every weight that an entry stores and that is not zero takes part in each answer at least once (of a text, each token),
and its bytes are read for it. The ceilings are measured, not looked up: operations a second of the widest instructions
that this machine has, whichever of them an entry uses, and bytes a second out of the nearest cache. What methods may
save is granted in full: four operations for one where weights are int8 (many more where the machine multiplies whole
tiles of them), and Winograd's four for one in convolutions. Half of the rest is granted too. Ceilings measured in a
restless minute are too low, so an entry below the floor is refused only after they were measured again, at length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.bench.runner import Runner
from tilewise.errors import Rejected
from tilewise.profile.machine import MachineFigures, cached_machine, measure_machine

Array = npt.NDArray[Any]
_INT8, _INT8_TILES, _WINOGRAD, _GRANTED = 4.0, 64.0, 4.0, 0.5
_SMALLEST_MODEL = 0.05  # share of the shipped weights that a smaller model needs at least; pruning fails below 0.1
_NEAR_BYTES = 32 << 10
_NOT_MULTIPLIED = ("mask", "embedding", "running_", "num_batches")
_BRIEFLY, _AT_LENGTH = 8, 64  # looks at the machine; each tries a millisecond five times and keeps the best


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of one thread on this machine: operations and bytes read per second."""

    operations: float  # of float32
    bytes_read: float

    @classmethod
    def of(cls, machine: MachineFigures) -> Ceilings:
        return cls(max(p.flops_per_second / p.threads for p in machine.peaks), machine.read_bandwidth(_NEAR_BYTES))

    def at_least(self, other: Ceilings) -> Ceilings:
        return Ceilings(max(self.operations, other.operations), max(self.bytes_read, other.bytes_read))


def measure_ceilings(attempts: int) -> Ceilings:
    """Measure the peak rates several times briefly and keep the best, to avoid moments of other load."""
    best = Ceilings(0.0, 0.0)
    for _ in range(attempts):
        best = best.at_least(Ceilings.of(measure_machine([_NEAR_BYTES], seconds=1e-3, threads=[1])))
    return best


@lru_cache(maxsize=1)
def ceilings() -> Ceilings:
    """Return this machine's peak rates: measured now or, if higher, cached by `tilewise machine`."""
    cached = cached_machine()
    return measure_ceilings(_BRIEFLY) if cached is None else measure_ceilings(_BRIEFLY).at_least(Ceilings.of(cached))


def least_seconds(entry: Runner, threads: int = 1, machine: Ceilings | None = None) -> float:
    """Return a lower bound on the seconds of one call, from its arithmetic and bytes and the machine's peaks."""
    machine = machine or ceilings()
    operations, bytes_read = 0.0, 0.0
    for array in _multiplied_arrays(entry):
        saved = (_int8_gain() if array.dtype == np.int8 else 1.0) * (_WINOGRAD if array.ndim == 4 else 1.0)
        operations += 2.0 * int(np.count_nonzero(array)) * _uses_per_call(entry) / saved
        bytes_read += array.nbytes * (_uses_per_call(entry) if entry.event.kind == "text" else 1)
    return _GRANTED * max(operations / machine.operations, bytes_read / machine.bytes_read) / threads


def least_plugin_seconds(shipped: Runner, threads: int = 1, machine: Ceilings | None = None) -> float:
    """Return a lower bound on the seconds of one call of any program that answers like the shipped model.

    For text every token must be equal, so every weight takes part in every token; the bytes are not counted, because a
    program may guess several tokens and verify them in one pass. For images a program may bring a smaller model that
    loses a point of accuracy, so most of the weights are granted. int8 is granted in full.
    """
    machine = machine or ceilings()
    weights = sum(array.size / (_WINOGRAD if array.ndim == 4 else 1.0) for array in _multiplied_arrays(shipped))
    share = 1.0 if shipped.event.kind == "text" else _SMALLEST_MODEL
    operations = 2.0 * share * weights * _uses_per_call(shipped) / _int8_gain()
    return _GRANTED * operations / machine.operations / threads


def _multiplied_arrays(entry: Runner) -> Iterator[Array]:
    """Yield the stored arrays of an entry that are operands of matrix products."""
    for name, array in entry.stored_arrays().items():
        if not any(part in name for part in _NOT_MULTIPLIED) and array.dtype.kind in "fi":
            yield array


def _uses_per_call(entry: Runner) -> int:
    """Return how often a call multiplies by each weight: once per image of the batch, or per new token."""
    return entry.event.batch if entry.event.kind == "images" else entry.event.new_tokens


def _int8_gain() -> float:
    return _INT8_TILES if native is not None and native.amx() == "hardware" else _INT8


def check_floor(seconds: float, least: Callable[[Ceilings], float]) -> float:
    """Return the lower bound on a call's `seconds`; reject an entry that is faster than it.

    `least` computes the bound from the machine's peak rates, for example by `least_seconds`.
    """
    floor_seconds = least(ceilings())
    if seconds < floor_seconds:
        floor_seconds = least(ceilings().at_least(measure_ceilings(_AT_LENGTH)))
    if seconds < floor_seconds:
        raise Rejected(
            "below the floor of time",
            f"a call took {1e6 * seconds:.3g} µs, and its arithmetic takes {1e6 * floor_seconds:.3g} µs at least: no "
            "program on this machine is that fast",
        )
    return floor_seconds
