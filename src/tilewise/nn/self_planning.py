"""Self-planning: a module in eval mode compiles itself when it is called, so that the obvious code is the fast code.

`Module.__call__` passes calls without gradients to `infer`. The outermost module of such a call gets a plan
(`tilewise.plan.compile`) on the first call with an input shape; the layers inside it do not plan themselves. Where a
plan cannot be made the module runs layer by layer, and `explain` says why. `self_planner.py` makes the plans.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.nn.module import Module
    from tilewise.nn.self_planner import SelfPlanner


class StructureCounter:
    """Global counter of assignments to module attributes, which may change what a module computes."""

    count = 0


class SelfPlanningSwitch:
    """Whether modules plan themselves; ``TILEWISE_SELF_PLANNING=0`` switches it off for the process."""

    is_on = os.environ.get("TILEWISE_SELF_PLANNING", "1") != "0"


structure = StructureCounter()
_OWN_PACKAGES = ("tilewise", "tilewise_arena", "tilewise_fleet")
_inside: ContextVar[bool] = ContextVar("inside", default=False)  # an outer module runs, or planning is suspended


def set_self_planning(on: bool) -> None:
    """Let modules in eval mode compile themselves when they are called (the default), or run them layer by layer."""
    if not isinstance(on, bool):
        raise ConfigurationError(f"set_self_planning takes True or False, not {on!r}")
    SelfPlanningSwitch.is_on = on


def get_self_planning() -> bool:
    """Return whether modules in eval mode compile themselves."""
    return SelfPlanningSwitch.is_on


def is_own(module: Module) -> bool:
    """Whether the class of a module is part of tilewise, whose code computes with tensors alone."""
    return type(module).__module__.partition(".")[0] in _OWN_PACKAGES


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Run modules layer by layer inside a `with` block, in this thread."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def infer(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module in eval mode, by its plan if there is or can be one, else layer by layer."""
    if _inside.get() or not SelfPlanningSwitch.is_on:
        return module.forward(*args, **kwargs)
    planner: SelfPlanner | None = vars(module).get("_planner")
    if planner is None:
        from tilewise.nn.self_planner import SelfPlanner

        planner = vars(module).setdefault("_planner", SelfPlanner())
    return planner.call(module, args, kwargs)


def explain(module: Module) -> str:
    """Describe how a module runs for each input shape it was called with, and why it has no plan where it has none.

    >>> from tilewise import models
    >>> print(explain(models.mlp().eval()))
    Sequential was not called yet in eval mode
    """
    name = type(module).__name__
    if not SelfPlanningSwitch.is_on:
        return f"{name} runs layer by layer: self-planning is off"
    planner: SelfPlanner | None = vars(module).get("_planner")
    if planner is None:
        return f"{name} was not called yet in eval mode"
    return "\n".join(f"{name} {line}" for line in planner.lines(module))
