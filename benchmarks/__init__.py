"""Each optimization compared with its peers: one run, a table, and JSON in results/.

``TILEWISE_ISA=avx2`` emulates a CPU without AVX-512. The peers are then limited to AVX2 as well: their libraries read
these variables when they are loaded, so they are set before any of them is imported. ONNX Runtime has no such variable.
Without it, variables of the environment that would hold a peer back are removed.
"""

import os

_HELD_TO_AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "CT2_FORCE_CPU_ISA": "AVX2",
}

if os.environ.get("TILEWISE_ISA") == "avx2":
    for _name, _value in _HELD_TO_AVX2.items():
        os.environ.setdefault(_name, _value)
else:
    for _name in (*_HELD_TO_AVX2, "OPENBLAS_L2_SIZE"):
        os.environ.pop(_name, None)
