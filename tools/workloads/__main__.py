"""`python -m tools.workloads`: write the built-in programs into the package, one list of kernels a kind of machine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from tilewise.store.problem import Kernel
from tilewise.tune import workloads
from tools.workloads.cpu import cpu_kernels
from tools.workloads.gpu import gpu_kernels


def written(kernels: Iterable[Kernel]) -> bytes:
    """A list of kernels as a file holds it: a JSON object a line, the same bytes every time."""
    lines = [json.dumps({"program": kernel.program, **kernel.problem}, separators=(",", ":")) for kernel in kernels]
    return gzip.compress(("[" + ",\n".join(lines) + "]\n").encode(), mtime=0)


if __name__ == "__main__":
    folder = Path(next(iter(workloads.__path__)))
    for kind, kernels in (("cpu", cpu_kernels()), ("triton", gpu_kernels())):
        (folder / f"{kind}.json.gz").write_bytes(written(kernels))
