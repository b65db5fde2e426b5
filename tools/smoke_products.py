"""Check `matmul` and `linear` on this GPU in about a minute: `python3 -m tools.smoke_products`."""

from __future__ import annotations

import itertools
import tempfile
import time

import torch

from tilewise.gpu.products import linear
from tilewise.gpu.products.dispatch import ProductDispatcher
from tilewise.gpu.products.roofline import is_cublas
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.tune.choose.cache import ChoiceFile
from tools.drawn_products import drawn_products


def main() -> int:
    """Run random products, a linear layer, a CUDA graph and the host overhead; return how many results are wrong."""
    model = shipped_runtime_model()
    assert model is not None
    dispatcher = ProductDispatcher(torch, model, ChoiceFile(tempfile.mkdtemp(), "smoke"))
    family, generator = dispatcher.family, torch.Generator(device="cuda").manual_seed(0)
    wrong = kernels = 0
    for number, (kind, problem) in enumerate(itertools.islice(drawn_products(77), 30)):
        operands = family.operands(problem, torch, "cuda", generator)
        expected = family.expected(problem, torch, operands)
        operands.out.fill_(float("nan"))
        start = time.perf_counter()
        decision = dispatcher.choose(problem, measure=number % 3 == 0)
        dispatcher.run(problem, operands, decision.config)
        torch.cuda.synchronize()
        kernel = not is_cublas(decision.config)
        kernels += kernel
        is_close = bool(((operands.out - expected.value).abs() <= expected.bound).all())
        if kernel and not is_close:
            wrong += 1
        if number % 3 == 0 or not is_close:
            print(kind, problem.key, decision, is_close, f"{time.perf_counter() - start:.2f} s", flush=True)
    x = torch.randn(4, 7, 1024, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(512, 1024, device="cuda", dtype=x.dtype), torch.randn(512, device="cuda", dtype=x.dtype)
    result = linear(x, w, b, activation="gelu", measure=True)
    expected_result = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
    print("linear", ((result - expected_result).float().norm() / expected_result.float().norm()).item(), flush=True)
    graph, static = torch.cuda.CUDAGraph(), torch.randn(16, 8192, device="cuda", dtype=x.dtype)
    weight = torch.randn(1024, 8192, device="cuda", dtype=x.dtype)
    linear(static, weight, measure=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = linear(static, weight)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    expected_result = static @ weight.T
    print("graph", ((out - expected_result).float().norm() / expected_result.float().norm()).item(), flush=True)
    start = time.perf_counter()
    for _ in range(200):
        linear(static, weight)
    print(
        f"host {(time.perf_counter() - start) * 5e3:.1f} us a call; {kernels} kernels of 30, {wrong} wrong", flush=True
    )
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
