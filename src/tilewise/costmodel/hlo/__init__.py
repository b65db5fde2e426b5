"""From a compiler's module, or a JAX function, to the graph that a cost model reads."""
