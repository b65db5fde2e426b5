"""Byte-pair merging (Sennrich et al. 2016): join the best pair of neighbours until no pair can be joined.

The pieces form a linked list and the candidate pairs a heap, so a text of n pieces takes O(n log n) steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


def merge(pieces: list[str], cost: Callable[[str, str], float | None]) -> list[str]:
    """Join neighbours in the order of `cost`, the lowest first, the leftmost among equals.

    `cost(a, b)` is None if `a` and `b` cannot be joined.
    """
    right_of = [*range(1, len(pieces)), -1]  # linked list of the remaining pieces
    left_of = [-1, *range(len(pieces) - 1)]
    current: list[str | None] = list(pieces)  # None: joined to its left neighbour
    heap: list[tuple[float, int, str, str]] = []

    def push(left: int) -> None:
        """Add the pair of a piece and its right neighbour to the heap, if it can be joined."""
        right = right_of[left]
        if right < 0:
            return
        a, b = current[left], current[right]
        assert a is not None
        assert b is not None
        pair_cost = cost(a, b)
        if pair_cost is not None:
            heapq.heappush(heap, (pair_cost, left, a, b))

    for i in range(len(pieces)):
        push(i)
    while heap:
        _, left, a, b = heapq.heappop(heap)
        right = right_of[left]
        if current[left] != a or right < 0 or current[right] != b:
            continue  # stale entry: one of the two was joined with another piece
        current[left], current[right] = a + b, None
        right_of[left] = right_of[right]
        if right_of[right] >= 0:
            left_of[right_of[right]] = left
        # The joined piece forms new pairs with both neighbours.
        push(left)
        if left_of[left] >= 0:
            push(left_of[left])
    return [piece for piece in current if piece is not None]
