"""Passes over the graph: patterns, lowering with fusion and layouts, and the partition into native calls."""
