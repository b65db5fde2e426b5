"""Measure how long a GPU choice takes: `python3 -m tools.choosing_time` prints medians over shapes; no GPU needed.

There are two choices: between the kernels of the family `product` and the library, and among PyTorch's exhaustive list
of templates as `tilewise.inductor` sees it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from tilewise.gpu.devices import H200
from tilewise.gpu.inductor.templates import problem_of, select_templates
from tilewise.gpu.products.dispatch import choose_unmeasured
from tilewise.gpu.products.family import ProductFamily
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tools.drawn_products import drawn_products

_SHARED_BYTES, _SHAPES = H200.shared_bytes_per_block, 60


def templates() -> tuple[list[str], list[dict[str, Any]]]:
    """List ATen and every block size, stage and warp count of a template, as PyTorch's exhaustive search does."""
    names: list[str] = ["aten::mm"]
    parameters: list[dict[str, Any]] = [{}]
    for m, n, k, stages, warps in itertools.product(*[(16, 32, 64, 128, 256)] * 3, (1, 2, 3, 4, 5), (2, 4, 8)):
        names.append("triton::mm")
        parameters.append({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_stages": stages, "num_warps": warps,
                           "GROUP_M": 8, "EVEN_K": True})  # fmt: skip
    return names, parameters


def report() -> float:
    """Print both medians in milliseconds and return the larger one."""
    model = shipped_runtime_model()
    assert model is not None
    problems = [problem for _, problem in itertools.islice(drawn_products(3), _SHAPES)]
    candidates = templates()

    def sides(m: int, n: int, k: int) -> Any:
        return problem_of("mm", ((m, k), (k, 1)), ((k, n), (1, k)), "torch.bfloat16")

    mms = [sides(*(problem.size(name) for name in ("m", "n", "k"))) for problem in problems]
    largest = max(len(ProductFamily().configs(problem)) for problem in problems)
    own = _median([lambda p=p: choose_unmeasured(model, p, _SHARED_BYTES) for p in problems])
    theirs = _median([lambda p=p: select_templates(model, p, candidates, 3) for p in mms])
    print(
        f"  choosing among up to {largest} kernels {own:.2f} ms, among {len(candidates[0])} templates {theirs:.2f} ms"
    )
    return max(own, theirs)


def _median(calls: list[Callable[[], Any]]) -> float:
    """Return the median time of the calls in milliseconds."""
    milliseconds = []
    for round_number in range(3):
        for call in calls:
            start = time.perf_counter()
            call()
            if round_number:  # the first round fills caches
                milliseconds.append((time.perf_counter() - start) * 1e3)
    return statistics.median(milliseconds)


if __name__ == "__main__":
    report()
