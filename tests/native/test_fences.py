"""No kernel touches a byte outside the arrays it is given, with any instruction set."""

import subprocess
import sys
from pathlib import Path

import pytest

from tilewise._extension import native

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = {  # kernels rarely look behind them: the longest loops are enough there
    "end": [
        "tests/backend",
        "tests/prune",
        "tests/quantize/test_exact.py",
        "tests/quantize/test_four_bits.py",
        "tests/nn/test_llama.py",
    ],
    "start": ["tests/backend/test_attention.py", "tests/backend/test_gemm.py", "tests/backend/test_sparse_kernels.py"],
}
# Not: promises about caches that know an array by its address, or about what a trained model says; what calls no kernel
# (NumPy's backend, refusals, the table of tiles); the same products again with other numbers of threads.
SELECTION = (
    "not make_room and not keeps_no_memory and not reuse_memory and not perplexity and not [numpy and not infeasible"
    " and not tile_table and not number_of_threads and not adam_takes"
)


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages the way Linux does")
@pytest.mark.parametrize("place", SUBJECTS)
def test_kernels_stay_inside_arrays_that_lie_beside_a_forbidden_page(place):
    command = [sys.executable, "tests/native/fenced.py", place, *SUBJECTS[place], "-q", "-k", SELECTION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
