"""Speed and memory claims of the teaching plan on every reference model, each with what is compared with what.

    python -m benchmarks.plan_speed

Both sides of a ratio are interleaved on one thread; the interval is of the ratio of medians. INT8 and pruned networks
are compared with the planned float32 network; "plain" is NumPy without tilewise's kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import machine_class, provenance, today
from tilewise import Tensor, data, models, no_grad
from tilewise._atomic import write_atomic
from tilewise.backend import OptimizedBackend, matmul_blocked, matmul_naive, use_backend
from tilewise.cli.optimize.before_after import bytes_with_kernels, load_image_task
from tilewise.cli.optimize.prune import _remove_filters
from tilewise.cli.optimize.pruning_tasks import ImagePruning
from tilewise.generate import generate, make_engine
from tilewise.graph.plan import compile
from tilewise.profile import Timer
from tilewise.prune import prune, shrink, sparsify
from tilewise.quantize import quantize

IMAGES = ("mlp", "cnn", "resnet8")
FILTERS = 1 - 0.3**0.5  # share of filters whose removal takes 70 % of the weights
Run = Callable[[], Any]


def ratio(claim: str, model: str, compared: str, slow: Run, fast: Run, **more: Any) -> dict[str, Any]:
    """Time two functions interleaved and return the claim's row."""
    with no_grad():
        timing = Timer(time_limit=20.0).compare({"slow": slow, "fast": fast}, runs=30, min_runs=3)
    comparison = timing.ratios["fast"]
    row = {"claim": claim, "model": model, "compared": compared, "times faster": 1 / comparison.ratio}
    row |= {
        "interval": [1 / comparison.interval.high, 1 / comparison.interval.low],
        **more,
        "doubts": list(timing.reasons),
    }
    print(f"{claim}, {model}: {row['times faster']:.2f}× ({compared})", flush=True)
    return row


def acceleration() -> Iterator[dict[str, Any]]:
    a = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    small, fast = a[:48, :48].copy(), OptimizedBackend().dispatch
    yield ratio(
        "10–100×", "matmul 256", "compiled blocked loops", lambda: matmul_blocked(a, a), lambda: fast("matmul", a, a)
    )
    yield ratio(
        "10–100×", "matmul 48", "Python loops", lambda: matmul_naive(small, small), lambda: fast("matmul", small, small)
    )


def images(name: str) -> Iterator[dict[str, Any]]:
    """INT8 and pruning of one classifier, in batches of 64."""
    digits, model = data.digits().for_model(name), models.pretrained(name)
    x, numpy_only = Tensor(digits.x_test[:64]), OptimizedBackend(only="numpy")
    int8: Any = quantize(model, np.array_split(digits.x_train[:256], 4))
    planned = compile(model, x)

    def plain() -> Any:
        with use_backend(numpy_only):
            return model(x)

    share = int8.nbytes / bytes_with_kernels(model)
    yield ratio("4×", name, "planned float32, planned INT8", lambda: planned(x), lambda: int8(x), memory=share)
    yield ratio("4×", name, "plain float32, planned INT8", plain, lambda: int8(x), memory=share)
    forms: dict[str, Any] = {"filters removed": shrink(model, FILTERS).eval()}
    if name == "mlp":
        # Without fine-tuning, INT8 would need 16 bits in two of its layers.
        task = ImagePruning(load_image_task(name, None, None), 64, 0)
        forms = {"sparse": sparsify(prune(model, 0.7), sample=x), "units removed": _remove_filters(task, 0.7, True, 20)}
    for form, smaller in forms.items():
        pruned, share = compile(smaller, x), bytes_with_kernels(smaller) / bytes_with_kernels(model)
        yield ratio("70 %", name, f"planned dense, {form}", lambda: planned(x), partial(pruned, x), memory=share)
    small_int8: Any = quantize(smaller, np.array_split(digits.x_train[:256], 4))
    yield ratio("cumulative", name, "plain, pruned and INT8", plain, lambda: small_int8(x))


def text() -> Iterator[dict[str, Any]]:
    """Caching, sparse decoding and the whole of the gpt."""
    model, prompt = models.pretrained("gpt"), data.text().valid[:16]
    sparse: Any = sparsify(prune(model, 0.7), sample=prompt[None, :1])

    def write(network: Any, tokens: int, **options: Any) -> Run:
        return lambda: list(generate(network, prompt, tokens, **options))

    share = make_engine(sparse).weight_bytes / make_engine(model).weight_bytes
    yield ratio("70 %", "gpt", "dense decoder, sparse decoder", write(model, 64), write(sparse, 64), memory=share)
    share = make_engine(model, weights="int8").weight_bytes / make_engine(model).weight_bytes
    int8 = write(model, 64, weights="int8")
    yield ratio("4×", "gpt", "float32 decoder, INT8 decoder", write(model, 64), int8, memory=share)
    without = [Timer(time_limit=20.0).measure(write(model, n, use_cache=False), runs=5).p50 for n in (40, 160)]
    cached = [Timer(time_limit=20.0).measure(write(model, n), runs=10).p50 for n in (40, 160)]
    growth = {"4 times the tokens, without": without[1] / without[0], "with": cached[1] / cached[0]}
    slow = write(model, 160, use_cache=False)
    yield ratio("O(N²) → O(N)", "gpt", "160 tokens without a cache, with one", slow, write(model, 160), **growth)
    numpy_only = OptimizedBackend(only="numpy")

    def plain() -> Any:
        with use_backend(numpy_only):
            return list(generate(model, prompt, 24, use_cache=False))

    yield ratio("cumulative", "gpt", "plain, cached and INT8", plain, write(model, 24, weights="int8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/plan_speed.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(1)
    claims = [*acceleration(), *(row for name in IMAGES for row in images(name)), *text()]
    content = {"date": today(), "machine": machine_class(), **provenance("plan_speed"), "claims": claims}
    write_atomic(options.json, json.dumps(content, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
