"""One number for a handful of timings.

What else goes on in a machine only ever slows down, so the faster timings say more. But a mean of the faster half
drops as timings are added, and a configuration that was timed more often would look faster. The faster two of three,
averaged over every three of the timings, has the same expectation however many there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def faster_two_of_three(times: Sequence[float]) -> float:
    """The mean of the faster two, averaged over every three of `times`; of fewer than three, the fastest.

    >>> faster_two_of_three([1.0, 9.0, 2.0])
    1.5
    """
    count = len(times)
    if count < 3:
        return min(times)
    # The one in place i (from 0, fastest first) is the fastest of the threes whose others come later, and the second of
    # those with one before and one behind it.
    weights = [(count - 1 - i) * (count - 2 - i) / 2 + i * (count - 1 - i) for i in range(count)]
    return statistics.fmean(sorted(times), weights)
