"""Exercises of the lesson on quantization. Write the three functions, then run `tilewise check quantization`."""


def affine(low, high):
    """Choose scale and zero point for uint8 numbers q, where value = (q - zero_point) * scale.

    Return (scale, zero_point). The 255 steps from q = 0 to q = 255 span the range from `low` to `high`, widened to
    contain zero. The zero point is rounded to an integer, which may shift this range by half a step.
    """
    raise NotImplementedError


def quantize_rows(weights):
    """Quantize weights to int8 numbers from -127 to 127 with one scale for each weights[i].

    Return (q, scale), so that q * scale is close to the weights.
    """
    raise NotImplementedError


def integer_product(x, zero_point, w):
    """Compute (x - zero_point) @ w exactly in int32, also if sums are too large to be exact in float32.

    `x` is uint8 (M, K), `w` is int8 (K, N).
    """
    raise NotImplementedError
