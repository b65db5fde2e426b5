"""Answers to the exercises on acceleration."""

import numpy as np


def blocked_matmul(a, b, block):
    (m, k), n = a.shape, b.shape[1]
    c = np.zeros((m, n))
    for i in range(0, m, block):
        for j in range(0, n, block):
            for p in range(0, k, block):
                c[i : i + block, j : j + block] += a[i : i + block, p : p + block] @ b[p : p + block, j : j + block]
    return c


def largest_block(cache_bytes):
    return int((cache_bytes // 12) ** 0.5)


def im2col(x, kh, kw):
    channels, height, width = x.shape
    rows, columns = height - kh + 1, width - kw + 1
    out = np.empty((channels, kh, kw, rows * columns))
    for i in range(kh):
        for j in range(kw):
            out[:, i, j] = x[:, i : i + rows, j : j + columns].reshape(channels, -1)
    return out.reshape(channels * kh * kw, -1)
