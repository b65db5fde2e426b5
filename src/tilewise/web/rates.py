"""How often one client may ask: a bucket of requests that fills up again with time, one per token or address."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_CLIENTS = 4096


class Rates:
    """`take(client)` says whether the client may ask now: `burst` at once, `per_second` in the long run."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client: (requests left, when)

    def take(self, client: str) -> bool:
        if not self._per_second:
            return True
        now = self._clock()
        left, when = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - when) * self._per_second)
        granted = left >= 1
        self._buckets[client] = (left - granted, now)
        if len(self._buckets) > _MOST_CLIENTS:  # whoever asked longest ago has a full bucket again anyway
            self._buckets.popitem(last=False)
        return granted
