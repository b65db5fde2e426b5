"""Exercises of the lesson on quantization. Write the three functions, then run `tilewise check quantization`."""


def affine(low, high):
    """(scale, zero_point) for uint8: value = (q - zero_point) * scale; the range must hold low, high and zero."""
    raise NotImplementedError


def quantize_rows(weights):
    """(q, scale): int8 numbers in -127..127 and one scale for each weights[i], so that q * scale is near weights."""
    raise NotImplementedError


def integer_product(x, zero_point, w):
    """(x - zero_point) @ w as int32 and exact, also for sums beyond float32; x is uint8 (M, K), w is int8 (K, N)."""
    raise NotImplementedError
