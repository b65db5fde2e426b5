"""Run `benchmarks/gpu_check.py` in the source tree: `python3 -m tilewise.tune.triton.check --out DIR`."""

import importlib.util
import runpy
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("benchmarks") is None:
        print(
            "tilewise: the check is in benchmarks/, which is not part of the package; run it in the source tree.",
            file=sys.stderr,
        )
        sys.exit(2)
    runpy.run_module("benchmarks.gpu_check", run_name="__main__")
