"""Names for authors of families; the code is in `store/problem.py`."""

from tilewise.store.problem import OWN_PROGRAM, Config, Kernel, Problem, Value, read_shapes, read_spec, shapes_from

__all__ = ["OWN_PROGRAM", "Config", "Kernel", "Problem", "Value", "read_shapes", "read_spec", "shapes_from"]
