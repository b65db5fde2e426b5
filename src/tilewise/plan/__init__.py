"""A module traced and compiled: one native call runs the network (`compile`), its operations are a list (`trace`)."""

from tilewise.plan.compiled import Plan, compile
from tilewise.plan.trace import Node, Trace, Value, trace

__all__ = ["Node", "Plan", "Trace", "Value", "compile", "trace"]
