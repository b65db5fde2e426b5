"""Compilation of a module for inference: `compile` returns a `Plan`, `trace` returns the recorded operations."""

from tilewise.graph.ir import Node, Trace, Value
from tilewise.graph.plan import Plan, compile
from tilewise.graph.trace import trace

__all__ = ["Node", "Plan", "Trace", "Value", "compile", "trace"]
