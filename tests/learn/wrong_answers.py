# ruff: noqa: E501
"""Wrong answers to every exercise, each with words that its feedback must contain.

`NAME(arguments)` with the body as text; every body may use NumPy as `np`.
"""

WRONG: dict[str, dict[str, list[tuple[str, str]]]] = {
    "profiling": {
        "percentile(s, q)": [
            ("interpolate", "s = sorted(s); return s[int(q / 100 * (len(s) - 1))]"),
            ("interpolate", "s = sorted(s); return s[round(q / 100 * (len(s) - 1))]"),
            ("(n - 1)", "s = sorted(s); return s[min(len(s) - 1, int(q / 100 * len(s)))]"),
            (
                "sort",
                "p = q / 100 * (len(s) - 1); i = int(p); return s[i] + (p - i) * (s[min(i + 1, len(s) - 1)] - s[i])",
            ),
            ("sign", "return float(np.percentile(-np.array(s), q))"),
            ("sort a copy", "s.sort(); return float(np.percentile(s, q))"),
            ("IndexError", "s = sorted(s); return s[int(q * (len(s) - 1)) + 1]"),
        ],
        "conv_flops(x, w, stride=1, padding=0)": [
            ("counts as 2", "return CONV // 2"),
            ("each image of the batch", "return CONV // x[0]"),
            ("all input channels", "return CONV // x[1]"),
            ("all kernel elements", "return CONV // (w[2] * w[3])"),
            ("fewer than inputs", "return 2 * x[0] * w[0] * x[2] * x[3] * w[1] * w[2] * w[3]"),
            ("padding makes the input larger", "padding = 0; return CONV"),
            ("a stride skips outputs", "stride = 1; return CONV"),
        ],
        "least_seconds(f, b, p, w)": [
            ("not their sum", "return f / p + b / w"),
            ("slower of the two", "return min(f / p, b / w)"),
            ("slower of the two", "return f / p"),
            ("slower of the two", "return b / w"),
            ("FLOPs by the peak", "return max(f / w, b / p)"),
            ("slower of the two", "return (f / p + b / w) / 2"),
        ],
    },
    "acceleration": {
        "blocked_matmul(a, b, block)": [
            ("the block is ignored", "return np.asarray(a) @ np.asarray(b)"),
            ("read blocks by slices", "return a @ b"),
            (
                "the block is ignored",
                "return np.vstack([a[i:i + block, :] @ np.asarray(b) for i in range(0, a.shape[0], block)])",
            ),
            (
                "adds to what is there",
                BLOCKED := "c = np.zeros((a.shape[0], b.shape[1]))\n"
                "for i in range(0, a.shape[0], block):\n for j in range(0, b.shape[1], block):\n"
                "  for k in range(0, a.shape[1], block):\n   c[i:i+block, j:j+block] = a[i:i+block, k:k+block] @ b[k:k+block, j:j+block]\n"
                "return c",
            ),
            (
                "border",
                BLOCKED.replace("= a[i", "+= a[i").replace(
                    "range(0, a.shape[1], block)", "range(0, a.shape[1] - block + 1, block)"
                ),
            ),
            ("not an array", BLOCKED.replace("= a[i", "+= a[i").replace("return c", "return c.tolist()")),
        ],
        "largest_block(c)": [
            ("three square", "return int((c / 4) ** 0.5)"),
            ("three square", "return int((c / 8) ** 0.5)"),
            ("4 bytes", "return int((c / 3) ** 0.5)"),
            ("root", "return c // 12"),
            ("round down", "return (c / 12) ** 0.5"),
            ("round down", "return int((c / 12) ** 0.5) + 1"),
        ],
        "im2col(x, kh, kw)": [
            ("is right", "return x"),
            ("is right", "return WINDOWS.transpose(0, 3, 4, 1, 2).reshape(x.shape[0] * kh * kw, -1).T"),
            ("(c, i, j)", "return WINDOWS.transpose(3, 4, 0, 1, 2).reshape(x.shape[0] * kh * kw, -1)"),
            (
                "not flipped",
                "return WINDOWS[..., ::-1, ::-1].transpose(0, 3, 4, 1, 2).reshape(x.shape[0] * kh * kw, -1)",
            ),
            ("wrong order or place", "return WINDOWS.transpose(0, 4, 3, 1, 2).reshape(x.shape[0] * kh * kw, -1)"),
            (
                "is right",
                "x = np.pad(x, ((0, 0), (1, 1), (1, 1)))\nreturn WINDOWS.transpose(0, 3, 4, 1, 2).reshape(x.shape[0] * kh * kw, -1)",
            ),
        ],
    },
    "quantization": {
        "affine(low, high)": [
            ("low, high and zero", "s = (high - low) / 255 or 1; return s, min(255, max(0, round(-low / s)))"),
            ("has not the form", "return {'scale': 1}"),
            ("wider than needed", "m = max(-low, high, 1e-9); return m / 127, 128"),
            (
                "wider than needed",
                "m = max(high, 0.0) - min(low, 0.0) or 1.0; return 2 * m / 255, round(-min(low, 0) / (2 * m / 255))",
            ),
            (
                "low, high and zero",
                "l, h = min(low, 0.0), max(high, 0.0); s = (h - l) / 256 or 1.0; return s, round(-l / s)",
            ),
            ("as an integer", "l, h = min(low, 0.0), max(high, 0.0); s = (h - l) / 255 or 1.0; return s, -l / s"),
            ("as an integer", "l, h = min(low, 0.0), max(high, 0.0); s = (h - l) / 255 or 1.0; return s, round(l / s)"),
            (
                "must be positive",
                "l, h = min(low, 0.0), max(high, 0.0); s = (h - l) / 255; return s, round(-l / s) if s else 0",
            ),
            ("to the nearest", "l, h = min(low, 0.0), max(high, 0.0); s = (h - l) / 255 or 1.0; return s, int(-l / s)"),
        ],
        "quantize_rows(w)": [
            ("own largest", "s = np.abs(w).max() / 127; return np.rint(w / s).astype(np.int8), np.full(len(w), s)"),
            ("int8", "return w, np.ones(len(w))"),
            ("truncates", "s = SCALE; return (w / WIDE).astype(np.int8), s"),
            ("127 steps", "s = SCALE * 127 / 128; return np.clip(np.rint(w / WIDE), -128, 127).astype(np.int8), s"),
            ("one for each row", "s = SCALE; return np.rint(w / WIDE).astype(np.int8), s[:, None]"),
            (
                "positive scale",
                "s = np.where(SCALE == 1, 0, SCALE); return np.rint(w / np.where(WIDE == 0, 1, WIDE)).astype(np.int8), s",
            ),
            ("own largest", "s = SCALE * 2; return np.rint(w / WIDE).astype(np.int8), s"),
        ],
        "integer_product(x, z, w)": [
            ("widen", "return x @ w"),
            ("widen", "return (x - np.uint8(z)).astype(np.int32) @ w.astype(np.int32)"),
            ("zero point is missing", "return x.astype(np.int32) @ w.astype(np.int32)"),
            ("widen", "return ((x.astype(np.int16) - z) @ w.astype(np.int16)).astype(np.int32)"),
            ("accumulate in int32", "return (x.astype(np.int64) - z) @ w.astype(np.int64)"),
            ("multiply integers", "return ((x.astype(np.float32) - z) @ w.astype(np.float32)).astype(np.int32)"),
            ("sum of each column", "return x.astype(np.int32) @ w.astype(np.int32) - np.int32(z) * np.int32(w.sum())"),
        ],
    },
    "pruning": {
        "magnitude_mask(w, s)": [
            (
                "compare magnitudes",
                "m = np.ones(w.size, bool); m[np.argsort(w, axis=None)[:round(s * w.size)]] = False; return m.reshape(w.shape)",
            ),
            (
                "weights that stay",
                "m = np.zeros(w.size, bool); m[np.argsort(np.abs(w), axis=None)[:round(s * w.size)]] = True; return m.reshape(w.shape)",
            ),
            ("round(sparsity * size)", "return np.abs(w) > np.quantile(np.abs(w), s)"),
            ("round(sparsity * size)", "return np.abs(w) > s"),
            (
                "array of bool",
                "m = np.ones(w.size); m[np.argsort(np.abs(w), axis=None)[:round(s * w.size)]] = 0; return m.reshape(w.shape)",
            ),
            ("array of bool", "return np.sort(np.abs(w), axis=None) > 0"),
            (
                "were asked for",
                "m = np.ones(w.size, bool); m[np.argsort(np.abs(w), axis=None)[:int(s * w.size)]] = False; return m.reshape(w.shape)",
            ),
        ],
        "two_of_four(w)": [
            (
                "neighbours in a row",
                "k = np.sort(np.abs(w), axis=1)[:, [w.shape[1] // 2]]; return np.where(np.abs(w) >= k, w, 0)",
            ),
            (
                "two largest stay",
                "g = w.reshape(-1, 4).copy(); np.put_along_axis(g, np.argsort(-np.abs(g), 1)[:, :2], 0, 1); return g.reshape(w.shape)",
            ),
            (
                "not values",
                "g = w.reshape(-1, 4).copy(); np.put_along_axis(g, np.argsort(g, 1)[:, :2], 0, 1); return g.reshape(w.shape)",
            ),
            (
                "not the mask",
                "g = np.abs(w.reshape(-1, 4)); m = np.ones(g.shape); np.put_along_axis(m, np.argsort(g, 1)[:, :2], 0, 1); return m.reshape(w.shape)",
            ),
            (
                "work on a copy",
                "g = w.reshape(-1, 4); np.put_along_axis(g, np.argsort(np.abs(g), 1)[:, :2], 0, 1); return w",
            ),
            (
                "the two of largest",
                "g = w.reshape(-1, 4).copy(); np.put_along_axis(g, np.argsort(np.abs(g), 1)[:, :1], 0, 1); return g.reshape(w.shape)",
            ),
        ],
        "remove_units(a, b, c, kept)": [
            ("a column of w2", "return a[kept], b[kept], c"),
            ("a column of w2", "return a[kept], b, c[:, kept]"),
            ("a column of w2", "m = np.isin(np.arange(len(b)), kept); return a * m[:, None], b * m, c * m"),
            ("not in kept", "m = ~np.isin(np.arange(len(b)), kept); return a[m], b[m], c[:, m]"),
            ("must give w1, b1 and w2", "return a[kept], c[:, kept]"),
            ("do not change", "return a[kept], b[kept] * 0, c[:, kept]"),
            ("do not change", "return a[:len(kept)], b[:len(kept)], c[:, :len(kept)]"),
        ],
    },
    "caching": {
        "attend(q, k, v)": [
            ("overflows", "e = np.exp(k @ q / len(q) ** 0.5); return e / e.sum() @ v"),
            ("sqrt(width)", "s = k @ q; e = np.exp(s - s.max()); return e / e.sum() @ v"),
            ("sqrt(width)", "s = k @ q / len(q); e = np.exp(s - s.max()); return e / e.sum() @ v"),
            ("add up to 1", "s = k @ q / len(q) ** 0.5; return np.exp(s - s.max()) @ v"),
            ("not the keys", "s = k @ q / len(q) ** 0.5; e = np.exp(s - s.max()); return e / e.sum() @ k"),
            ("sqrt(width)", "s = k @ q / len(k) ** 0.5; e = np.exp(s - s.max()); return e / e.sum() @ v"),
        ],
        "store(K, V, k, v, p)": [
            ("copy", "K[p], V[p] = k, v; return K[:p + 1].copy(), V[:p + 1].copy()"),
            ("and no more", "K[p], V[p] = k, v; return K, V"),
            ("with this position", "K[p], V[p] = k, v; return K[:p], V[:p]"),
            ("into keys", "return K[:p + 1], V[:p + 1]"),
            ("gave a copy", "return np.concatenate([K[:p], k[None]]), np.concatenate([V[:p], v[None]])"),
            ("must give", "K[p], V[p] = k, v; return K[:p + 1]"),
            ("the key into keys", "K[p], V[p] = v, k; return K[:p + 1], V[:p + 1]"),
        ],
        "tokens_computed(prompt, new, cached)": [
            ("not fed back", "return prompt + new if cached else sum(prompt + i for i in range(new))"),
            ("one token longer", "return (prompt + new - 1 if new else 0) if cached else prompt * new"),
            ("the prompt goes through", "return new if cached else sum(prompt + i for i in range(new))"),
            (
                "fewer, not more",
                "cached = not cached; return (prompt + new - 1 if new else 0) if cached else sum(prompt + i for i in range(new))",
            ),
            (
                "nothing goes through the model",
                "return prompt + max(new - 1, 0) if cached else sum(prompt + i for i in range(new))",
            ),
            (
                "each further one out of a pass",
                "return (prompt + new - 1 if new else 0) if cached else (prompt + new) ** 2",
            ),
        ],
    },
    "benchmarking": {
        "take_turns(f, n, clock)": [
            (
                "alternate",
                "out = {}\nfor name, g in f.items():\n out[name] = []\n for _ in range(n):\n  t = clock(); g(); out[name].append(clock() - t)\nreturn out",
            ),
            (
                "just before and just after",
                TURNS
                := "out = {name: [] for name in f}\nfor _ in range(n):\n t = clock()\n for name, g in f.items():\n  g(); out[name].append(clock() - t)\nreturn out",
            ),
            (
                "was asked for",
                TURNS.replace("range(n)", "range(n + 1)")
                .replace(" t = clock()\n", "")
                .replace("g(); ", "t = clock(); g(); "),
            ),
            ("a list with the time", TURNS.replace("return out", "return {k: sum(v) / n for k, v in out.items()}")),
            ("for each name", TURNS.replace("return out", "return {'a': out['a']}")),
            (
                "just before and just after",
                "out = {name: [] for name in f}\nfor _ in range(n):\n for name, g in f.items():\n  g(); out[name].append(clock())\nreturn out",
            ),
        ],
        "ratio_interval(old, new, rng)": [
            (
                "a mean follows",
                BOOT
                := "r = [np.mean(rng.choice(old, 60)) / np.mean(rng.choice(new, 60)) for _ in range(500)]; return tuple(np.quantile(r, [0.025, 0.975]))",
            ),
            ("2.5 % off each side", BOOT.replace("mean", "median").replace("0.025, 0.975", "0.05, 0.95")),
            ("a mean follows", BOOT.replace("0.025, 0.975", "0.05, 0.95")),
            ("resample both", BOOT.replace("np.mean(rng.choice(new, 60))", "np.median(new)").replace("mean", "median")),
            ("with replacement", BOOT.replace("mean", "median").replace("60)", "60, False)")),
            (
                "above 1",
                "r = [np.median(rng.choice(new, 60)) / np.median(rng.choice(old, 60)) for _ in range(500)]; return tuple(np.quantile(r, [0.025, 0.975]))",
            ),
            ("the lower end", BOOT.replace("mean", "median").replace("0.025, 0.975", "0.975, 0.025")),
            ("samples' spread", "return tuple(np.quantile(old / new, [0.025, 0.975]))"),
        ],
        "score(g, a, f)": [
            ("geometric", "return 0.0 if a < f else sum(g) / 3"),
            ("third root", "return 0.0 if a < f else g[0] * g[1] * g[2]"),
            ("worth nothing", "return (g[0] * g[1] * g[2]) ** (1 / 3)"),
            ("not below it", "return 0.0 if a <= f else (g[0] * g[1] * g[2]) ** (1 / 3)"),
            ("geometric", "return 0.0 if a < f else 3 / sum(1 / x for x in g)"),
            ("not a number", "return None if a < f else (g[0] * g[1] * g[2]) ** (1 / 3)"),
            ("geometric", "return 0.0 if a < f else max(g)"),
        ],
    },
    "costmodel": {
        "slowdown(r, s, k)": [
            ("lowest scores", "return min(r[s.argsort()[-k:]]) / min(r) - 1"),
            ("take 1 away", "return min(r[s.argsort()[:k]]) / min(r)"),
            ("not their mean", "return np.mean(r[s.argsort()[:k]]) / min(r) - 1"),
            ("over the best of all", "return min(r) / min(r[s.argsort()[:k]]) - 1"),
            ("lowest scores", "return min(r[:k]) / min(r) - 1"),
            ("k lowest scores", "return min(r[r.argsort()[:k]]) / min(r) - 1"),
        ],
        "ordered_pairs(r, s)": [
            (
                "equal runtimes",
                "n = len(r); return sum((r[i] < r[j]) == (s[i] < s[j]) for i in range(n) for j in range(i)) / (n * (n - 1) / 2)",
            ),
            (
                "orders must agree",
                "n = len(r); p = [(i, j) for i in range(n) for j in range(n) if r[i] < r[j]]; return sum(s[i] > s[j] for i, j in p) / len(p)",
            ),
            (
                "of all pairs",
                "return float(np.mean([(r[i] < r[i + 1]) == (s[i] < s[i + 1]) for i in range(len(r) - 1)]))",
            ),
            ("of all pairs", "return float(np.corrcoef(r, s)[0, 1])"),
            (
                "of all pairs",
                "n = len(r); return sum(r[i] < r[j] and s[i] < s[j] for i in range(n) for j in range(n)) / n ** 2",
            ),
            ("of all pairs", "return sum(r[i] < r[j] and s[i] < s[j] for i in range(len(r)) for j in range(len(r)))"),
        ],
        "tile_numbers(shape, tile)": [
            ("rounded up", "return TILE | {'tiles': (shape[0] // tile[0]) * (shape[1] // tile[1])}"),
            ("output tiles", "return TILE | {'tiles': TILE['tiles'] * -(-shape[2] // tile[2]) + 1}"),
            ("padded work", "return TILE | {'waste': 1 / (1 - TILE['waste'])}"),
            ("padded work", "return TILE | {'waste': 100 * TILE['waste'] + 1}"),
            ("float32 blocks", "return TILE | {'bytes': TILE['bytes'] // 4}"),
            ("float32 blocks", "return TILE | {'bytes': 4 * tile[0] * tile[1] * tile[2]}"),
            ("dict with", "return {'tiles': TILE['tiles']}"),
        ],
    },
}
# Parts of right answers that wrong ones use.
PARTS = {
    "CONV": "(2 * x[0] * w[0] * ((x[2] + 2 * padding - w[2]) // stride + 1) * ((x[3] + 2 * padding - w[3]) // stride + 1)"
    " * x[1] * w[2] * w[3])",
    "WINDOWS": "np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(1, 2))",
    "SCALE": "(lambda m: np.where(m > 0, m / 127, 1.0))(np.abs(w).reshape(len(w), -1).max(1))",
    "WIDE": "s.reshape(-1, *[1] * (w.ndim - 1))",
    "TILE": "(lambda c, t: {'tiles': c[0] * c[1], 'waste': 1 - float(np.prod(shape)) / float(np.prod([a * b for a, b in "
    "zip(c, t)])), 'bytes': 4 * (t[0] * t[2] + t[2] * t[1] + t[0] * t[1])})([-(-a // b) for a, b in zip(shape, tile)], tile)",
}


def source(signature: str, body: str) -> str:
    """Return the text of a file with one wrong answer."""
    for name, part in PARTS.items():
        body = body.replace(name, part)
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"import numpy as np\n\n\ndef {signature}:\n{lines}\n"
