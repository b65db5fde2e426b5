"""Converts an HLO module, a JAX function or a kernel's operation to the graph that a cost model reads."""
