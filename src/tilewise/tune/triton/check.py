"""`python3 -m tilewise.tune.triton.check --out DIR`, run in the source tree: `benchmarks/gpu_check.py` is the code."""

import importlib.util
import runpy
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("benchmarks") is None:
        print(
            "tilewise: the check lies beside the package, in benchmarks/; run it in the source tree.", file=sys.stderr
        )
        sys.exit(2)
    runpy.run_module("benchmarks.gpu_check", run_name="__main__")
