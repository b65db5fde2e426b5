"""Byte-pair merging: neighbours are joined, the best pair of all first, until no pair is known.

The pieces are a linked list and the candidates a heap, so that a text of n pieces takes n log n steps whatever it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


def merge(pieces: list[str], cost: Callable[[str, str], float | None]) -> list[str]:
    """`cost` of joining two neighbours, None where they cannot be; the least comes first, of equals the leftmost."""
    after = [*range(1, len(pieces)), -1]
    before = [-1, *range(len(pieces) - 1)]
    whole: list[str | None] = list(pieces)
    heap: list[tuple[float, int, str, str]] = []

    def offer(left: int) -> None:
        right = after[left]
        if right < 0:
            return
        a, b = whole[left], whole[right]
        assert a is not None
        assert b is not None
        found = cost(a, b)
        if found is not None:
            heapq.heappush(heap, (found, left, a, b))

    for i in range(len(pieces)):
        offer(i)
    while heap:
        _, left, a, b = heapq.heappop(heap)
        right = after[left]
        if whole[left] != a or right < 0 or whole[right] != b:
            continue  # one of the two was joined otherwise in the meantime
        whole[left], whole[right] = a + b, None
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(left)
        if before[left] >= 0:
            offer(before[left])
    return [piece for piece in whole if piece is not None]
