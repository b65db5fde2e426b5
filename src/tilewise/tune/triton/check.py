"""`python3 -m tilewise.tune.triton.check --out DIR`; `choose/gpu_check.py` is the code."""

import sys

from tilewise.tune.choose.gpu_check import main

if __name__ == "__main__":
    sys.exit(main())
