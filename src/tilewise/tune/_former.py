"""Module paths of the last release that documentation named: they lead to where the modules are now, for one release.

A family of a user's own registers with `tilewise.tune.cpu.family`; the old path must give the very same module as the
new one, or there would be two registries. So a finder answers for the old names with the new modules themselves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = "tilewise.tune."
FORMER = {
    _HERE + old: new
    for old, new in {
        "chooser": _HERE + "choose.chooser",
        "collecting": _HERE + "measure.collect",
        "cpu": _HERE + "families.cpu",
        "cpu.family": _HERE + "families.cpu.family",
        "cpu.memory": _HERE + "families.cpu.operands",
        "cpu.programs": _HERE + "workloads.cpu",
        "graph": "tilewise.costmodel.hlo.graph",
        "operations": _HERE + "families.graphs",
        "programs": _HERE + "workloads.gpu",
        "replaying": _HERE + "search.replay",
        "specs": _HERE + "problem",
        "store": _HERE + "measure.store",
        "triton.family": _HERE + "families.triton.family",
        "tuner": _HERE + "choose.tuner",
    }.items()
}


class FormerPaths(MetaPathFinder, Loader):
    """Finds a module under its former name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in FORMER else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(FORMER[module.__name__])


def answer_for_former_paths() -> None:
    # Before the finder of files, which would load `tilewise.tune.cpu.family` a second time through its parent's path.
    sys.meta_path.insert(0, FormerPaths())
