"""`matmul` and `linear` on this GPU, once through everything: `python3 -m tools.smoke_products`; a minute at most."""

from __future__ import annotations

import itertools
import tempfile
import time

import torch

from tilewise.gpu.products import dispatch as products
from tilewise.gpu.products.config_fields import is_cublas
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.tune.choose.cache import Choices
from tools.drawn_products import drawn_products


def main() -> int:
    model = shipped_runtime_model()
    assert model is not None
    where = products.ProductDispatcher(torch, model, Choices(tempfile.mkdtemp(), "smoke"))
    family, generator = where.family, torch.Generator(device="cuda").manual_seed(0)
    wrong = kernels = 0
    for number, (kind, problem) in enumerate(itertools.islice(drawn_products(77), 30)):
        operands = family.operands(problem, torch, "cuda", generator)
        expected = family.expected(problem, torch, operands)
        operands.out.fill_(float("nan"))
        start = time.perf_counter()
        decided = where.choose(problem, measure=number % 3 == 0)
        where.run(problem, operands, decided.config)
        torch.cuda.synchronize()
        kernel = not is_cublas(decided.config)
        kernels += kernel
        near = bool(((operands.out - expected.value).abs() <= expected.bound).all())
        if kernel and not near:
            wrong += 1
        if number % 3 == 0 or not near:
            print(kind, problem.key, decided, near, f"{time.perf_counter() - start:.2f} s", flush=True)
    x = torch.randn(4, 7, 1024, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(512, 1024, device="cuda", dtype=x.dtype), torch.randn(512, device="cuda", dtype=x.dtype)
    got = products.linear(x, w, b, activation="gelu", measure=True)
    want = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
    print("linear", ((got - want).float().norm() / want.float().norm()).item(), flush=True)
    graph, static = torch.cuda.CUDAGraph(), torch.randn(16, 8192, device="cuda", dtype=x.dtype)
    weight = torch.randn(1024, 8192, device="cuda", dtype=x.dtype)
    products.linear(static, weight, measure=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = products.linear(static, weight)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    want = static @ weight.T
    print("graph", ((out - want).float().norm() / want.float().norm()).item(), flush=True)
    start = time.perf_counter()
    for _ in range(200):
        products.linear(static, weight)
    print(
        f"host {(time.perf_counter() - start) * 5e3:.1f} us a call; {kernels} kernels of 30, {wrong} wrong", flush=True
    )
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
