"""Each optimization compared with its peers: one run, a table, and JSON in results/.

``TILEWISE_ISA=avx2`` makes a machine with AVX-512 play one without, and then the peers play along: their libraries read
these variables when they are loaded, so they are set before any of them is imported. ONNX Runtime knows none such.
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
