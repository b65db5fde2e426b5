"""Rate limits: one token bucket per client (an access token or an address)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_MAX_CLIENTS = 4096  # buckets in memory; arbitrary


class Rates:
    """Allows each client `burst` requests at once, and `per_second` on average; 0 means no limit."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client: (tokens, time)

    def take(self, client: str) -> bool:
        """Take a token from the client's bucket; returns False if it is empty."""
        if not self._per_second:
            return True
        now = self._clock()
        tokens, last = self._buckets.pop(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - last) * self._per_second)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > _MAX_CLIENTS:  # the least recent client has probably a full bucket again
            self._buckets.popitem(last=False)
        return allowed
