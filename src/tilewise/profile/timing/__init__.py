"""Timing a callable: the clock and its own cost, limits, fresh processes, statistics, and whether to trust them."""
