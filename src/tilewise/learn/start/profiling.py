"""Exercises of the lesson on profiling. Write the three functions, then run `tilewise check profiling`."""


def percentile(samples, q):
    """The q-th percentile (0 to 100) of a list of timings, interpolated between neighbours; no NumPy needed."""
    raise NotImplementedError


def conv_flops(x_shape, w_shape, stride=1, padding=0):
    """The FLOPs of a convolution of x (N, C, H, W) with w (O, C, kh, kw); a multiply-add counts as 2."""
    raise NotImplementedError


def least_seconds(flops, bytes_moved, peak_flops, bandwidth):
    """The least time in which a machine of this peak (FLOP/s) and bandwidth (bytes/s) can do the work."""
    raise NotImplementedError
