"""A sparse array on disk: one bit per element and the elements that are not zero.

>>> import numpy as np
>>> parts = packed_arrays(np.array([[0, 3], [4, 0]], np.int8))
>>> parts["mask"], parts["values"]
(array([96], dtype=uint8), array([3, 4], dtype=int8))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MOST_ELEMENTS = 2**27  # a gibibyte with its mask; the largest matrix of a GPT-2 has 2**26.3


def packed_arrays(dense: Array, prefix: str = "") -> dict[str, Array]:
    return {
        f"{prefix}shape": np.array(dense.shape, np.int64),
        f"{prefix}mask": np.packbits(dense != 0),
        f"{prefix}values": dense[dense != 0],
    }


def unpacked_array(arrays: dict[str, Array], dtype: npt.DTypeLike, prefix: str = "") -> Array:
    """What `packed_arrays` packed; KeyError or ValueError where the parts do not belong together."""
    shape = tuple(int(n) for n in arrays[f"{prefix}shape"])
    bits, values = arrays[f"{prefix}mask"], arrays[f"{prefix}values"]
    size = 1
    for n in shape:
        if n < 0 or (size := size * n) > _MOST_ELEMENTS:
            raise ValueError("a shape that no array has")
    if bits.dtype != np.uint8 or bits.shape != (-(-size // 8),) or values.ndim != 1 or values.dtype != dtype:
        raise ValueError("a mask or values that do not fit the shape")
    mask = np.unpackbits(bits, count=size).astype(bool)
    if np.count_nonzero(mask) != values.size:
        raise ValueError("as many values as bits")
    dense = np.zeros(size, dtype)
    dense[mask] = values
    return dense.reshape(shape)
