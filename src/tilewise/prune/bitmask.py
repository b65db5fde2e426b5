"""File format of sparse arrays: one bit per element, and the non-zero elements.

>>> import numpy as np
>>> arrays = pack_sparse(np.array([[0, 3], [4, 0]], np.int8))
>>> arrays["mask"], arrays["values"]
(array([96], dtype=uint8), array([3, 4], dtype=int8))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MAX_ELEMENTS = 2**27  # guards against hostile files; the largest matrix of GPT-2 has 2**26.3


def pack_sparse(dense: Array, prefix: str = "") -> dict[str, Array]:
    """Pack an array into its shape, a bitmask and the non-zero values."""
    return {
        f"{prefix}shape": np.array(dense.shape, np.int64),
        f"{prefix}mask": np.packbits(dense != 0),
        f"{prefix}values": dense[dense != 0],
    }


def unpack_sparse(arrays: dict[str, Array], dtype: npt.DTypeLike, prefix: str = "") -> Array:
    """Unpack the result of `pack_sparse`; KeyError or ValueError if the arrays are inconsistent."""
    shape = tuple(int(n) for n in arrays[f"{prefix}shape"])
    bits, values = arrays[f"{prefix}mask"], arrays[f"{prefix}values"]
    size = 1
    for n in shape:
        if n < 0 or (size := size * n) > _MAX_ELEMENTS:
            raise ValueError("the shape is invalid or too large")
    if bits.dtype != np.uint8 or bits.shape != (-(-size // 8),) or values.ndim != 1 or values.dtype != dtype:
        raise ValueError("the mask or the values do not fit the shape")
    mask = np.unpackbits(bits, count=size).astype(bool)
    if np.count_nonzero(mask) != values.size:
        raise ValueError("the number of values differs from the number of set bits")
    dense = np.zeros(size, dtype)
    dense[mask] = values
    return dense.reshape(shape)
