"""Exercises of the lesson on profiling. Write the three functions, then run `tilewise check profiling`."""


def percentile(samples, q):
    """Return the q-th percentile (q from 0 to 100) of a list of timings, interpolated between neighbours.

    Write it without NumPy.
    """
    raise NotImplementedError


def conv_flops(x_shape, w_shape, stride=1, padding=0):
    """Count the FLOPs of a convolution of x (N, C, H, W) with w (O, C, kh, kw); a multiply-add counts as 2."""
    raise NotImplementedError


def least_seconds(flops, bytes_moved, peak_flops, bandwidth):
    """Return the shortest time in which a machine can do the work, by the roofline model.

    The machine does `peak_flops` operations per second and moves `bandwidth` bytes per second, both at the same time.
    """
    raise NotImplementedError
