"""Answers to the exercises on profiling."""


def percentile(samples, q):
    ordered = sorted(samples)
    place = q / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def conv_flops(x_shape, w_shape, stride=1, padding=0):
    n, channels, height, width = x_shape
    filters, _, kh, kw = w_shape
    rows = (height + 2 * padding - kh) // stride + 1
    columns = (width + 2 * padding - kw) // stride + 1
    return 2 * n * filters * rows * columns * channels * kh * kw


def least_seconds(flops, bytes_moved, peak_flops, bandwidth):
    return max(flops / peak_flops, bytes_moved / bandwidth)
