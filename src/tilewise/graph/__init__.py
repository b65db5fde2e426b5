"""The graph of a network and the passes that turn it into native calls.

A module is traced (`trace.trace`) into a `Trace` of framework operations. `passes.patterns` replaces operations that
together are one layer, `passes.lower` maps the nodes to `Op`s of the native runtime and fuses them, and
`passes.partition` groups the ops into native calls. `plan.compile` runs all of it.
"""
