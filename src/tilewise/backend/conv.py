"""Convolution and pooling by the compiled kernels: float32, NCHW in and out, channels-last inside.

The registered functions are the compiled ones themselves; a Python layer would cost as much as a small pooling. A
convolution runs Winograd's F(4x4, 3x3) where that needs fewer instructions than the direct kernel (3x3, stride 1,
enough channels) and every value is small enough for its transforms; the direct kernel takes the rest, NaN and infinity
included.

Weights are repacked for the kernel once and kept: the library holds a copy of the raw weights beside the packed ones,
compares them at every call and repacks when they differ, so weights may be changed in place at any time.
"""

from __future__ import annotations

from tilewise._extension import native
from tilewise.backend.registry import implements

if native is not None:
    for _op in ("conv2d", "conv2d_grad_input", "conv2d_grad_weight"):
        implements(_op, "native", native.conv_suits)(getattr(native, _op))
    for _op in ("max_pool2d", "max_pool2d_grad", "avg_pool2d", "avg_pool2d_grad"):
        implements(_op, "native", native.pool_suits)(getattr(native, _op))
