"""No entry is faster than its own arithmetic on this machine.

Every weight that an entry stores and that is not zero takes part in each answer at least once (of a text, each token),
and its bytes are read for it. The ceilings are measured, not looked up: operations a second of the instruction set in
force, bytes a second out of the nearest cache. What methods may save is granted in full: four operations for one where
weights are int8, and Winograd's four for one in convolutions. Half of the rest is granted too, since ceilings measured
in a restless minute are too low; what is faster than that was not computed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewise.bench.errors import Rejected
from tilewise.bench.runner import Runner
from tilewise.profile.machine import Machine, kept_machine, measure_machine

_INT8, _WINOGRAD, _GRANTED = 4.0, 4.0, 0.5
_NEAR_BYTES = 32 << 10
_NOT_MULTIPLIED = ("mask", "embedding", "running_", "num_batches")


@lru_cache(maxsize=1)
def ceilings() -> Machine:
    """This machine's, as kept by `tilewise machine`, or measured briefly now."""
    return kept_machine() or measure_machine([_NEAR_BYTES, 1 << 20], seconds=0.005)


def least_seconds(entry: Runner, threads: int = 1) -> float:
    """What a call of `entry` takes at the least."""
    machine = ceilings()
    uses = entry.event.batch if entry.event.kind == "images" else entry.event.new_tokens
    operations, bytes_read = 0.0, 0.0
    for name, array in entry.stored_arrays().items():
        if any(part in name for part in _NOT_MULTIPLIED) or array.dtype.kind not in "fi":
            continue
        saved = (_INT8 if array.dtype == np.int8 else 1.0) * (_WINOGRAD if array.ndim == 4 else 1.0)
        operations += 2.0 * int(np.count_nonzero(array)) * uses / saved
        bytes_read += array.nbytes * (uses if entry.event.kind == "text" else 1)
    moving = bytes_read / (machine.read_bandwidth(_NEAR_BYTES) * threads)
    return _GRANTED * max(operations / machine.peak(threads), moving)


def check_floor(entry: Runner, seconds: float, threads: int = 1) -> float:
    """The least a call can take, if `seconds` are not less than that."""
    least = least_seconds(entry, threads)
    if seconds < least:
        raise Rejected(
            "below the floor of time",
            f"a call took {1e6 * seconds:.3g} µs, and its arithmetic takes {1e6 * least:.3g} µs at the very least: no "
            "program on this machine is that fast",
        )
    return least
