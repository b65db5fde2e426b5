"""Products on a GPU, as far as they can be checked without one: what fits, what is predicted, what is chosen."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np
import pytest

from tilewise.errors import ConfigurationError
from tilewise.gpu.products.choose import LIBRARY, decide, matmul, needed, problem_of, ranked
from tilewise.gpu.products.family import MOST_SUMS, Product, cut, takes_descriptors, workspace
from tilewise.gpu.products.roofline import columns, fits
from tilewise.gpu.products.runtimes import Runtimes, shipped_runtimes
from tilewise.store.problem import Config, Problem
from tools.drawn_products import KINDS, drawn_products

SHARED = 232_448
FAMILY = Product()


def _drawn(count: int, seed: int = 7) -> list[Problem]:
    return [problem for _, problem in itertools.islice(drawn_products(seed), count)]


def _model() -> Runtimes:
    model = shipped_runtimes()
    assert model is not None
    return model


def test_the_library_is_the_first_configuration_of_every_product() -> None:
    assert all(FAMILY.configs(problem)[0] == LIBRARY for problem in _drawn(len(KINDS)))


def test_what_fits_is_the_same_for_all_at_once_and_for_each() -> None:
    for problem in _drawn(15):
        configs = FAMILY.configs(problem)[1:]
        at_once = fits(problem, columns(configs), SHARED, MOST_SUMS)
        assert at_once.tolist() == [FAMILY.misfit(problem, config, SHARED) is None for config in configs]


def test_no_configuration_that_fits_wants_descriptors_of_rows_that_have_none() -> None:
    for problem in _drawn(25):
        if not takes_descriptors(problem):
            assert not any(config.get("tma") for config in FAMILY.configs(problem))


def test_units_of_work_cover_every_tile_once() -> None:
    for problem in _drawn(20):
        for config in FAMILY.configs(problem)[1::7]:
            if FAMILY.misfit(problem, config, SHARED) is None:
                parts, whole, tiles = cut(problem, config)
                assert 0 <= whole <= tiles and parts >= 1
                assert workspace(problem, config)[1] == (tiles - whole if parts > 1 else 0)
                steps = math.ceil(problem.size("k") / config.size("block_k"))
                assert math.ceil(steps / parts) * (parts - 1) < steps  # no part of K is empty


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 65536, 8), (8192, 8192, 8192), (3, 5, 100_000), (100_000, 8, 64)])
def test_predictions_are_times_wherever_the_sizes_lie(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    problem = Problem.of("product", dtype="bf16", m=m, n=n, k=k, layout="nt", epilogue="none")
    found = _model().predict(problem, FAMILY.configs(problem))
    assert np.isfinite(found.seconds).all() and (found.seconds > 5e-7).all() and (found.deviation >= 0).all()


def test_an_unmeasured_choice_fits_and_is_the_same_every_time() -> None:
    for problem in _drawn(20):
        first = decide(_model(), problem, SHARED)
        assert FAMILY.misfit(problem, first.config, SHARED) is None
        assert first == decide(_model(), problem, SHARED) and first.gain >= 1.0 and not first.measured


def test_where_rows_are_no_whole_wide_loads_a_kernel_has_to_be_further_ahead() -> None:
    even, odd = (
        Problem.of("product", dtype="bf16", m=5718, n=1064, k=k, layout="nt", epilogue="none") for k in (504, 501)
    )
    assert takes_descriptors(even) and not takes_descriptors(odd) and needed(odd, 0.08) > needed(even, 0.08)
    slower = Problem({**odd, "n": 1063})  # the kernel was predicted to save a third of the time, and took 1.09 of it
    assert decide(_model(), slower, SHARED).config == LIBRARY


def test_kernels_are_ranked_by_their_predicted_time() -> None:
    problem = _drawn(1)[0]
    configs, found = ranked(_model(), problem, SHARED, 12)
    assert len(configs) == 12 and (np.diff(found.seconds) >= 0).all()
    assert all(FAMILY.misfit(problem, config, SHARED) is None for config in configs)


def test_tf32_is_ranked_as_the_16_bit_product_that_moves_as_many_bytes_and_left_to_the_library_unmeasured() -> None:
    half = Problem.of("product", dtype="bf16", m=512, n=4096, k=2048, layout="nt", epilogue="none")
    wide = Problem({**half, "dtype": "tf32", "k": 1024})
    (configs, found), (others, same) = (ranked(_model(), problem, SHARED, 8) for problem in (wide, half))
    assert [{**c, "block_k": 2 * c.size("block_k")} for c in configs] == [dict(c) for c in others]
    assert np.array_equal(found.seconds, same.seconds)
    assert all(FAMILY.misfit(wide, config, SHARED) is None for config in configs)
    assert decide(_model(), wide, SHARED).config == LIBRARY


def test_float32_matrices_are_multiplied_in_tf32_where_pytorch_may() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    assert problem_of(a, b, None, None, "none") is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = problem_of(a, b, None, None, "none")
    finally:
        torch.set_float32_matmul_precision(before)
    assert found is not None and found.word("dtype") == "tf32"


def test_without_a_gpu_products_are_the_library_s() -> None:
    torch = pytest.importorskip("torch")
    a, b, bias = torch.randn(6, 16), torch.randn(16, 8), torch.randn(8)
    assert torch.equal(matmul(a, b), a @ b)
    assert torch.allclose(matmul(a, b, bias, activation="relu"), torch.relu(torch.addmm(bias, a, b)))
    with pytest.raises(ConfigurationError, match="needs a bias"):
        matmul(a, b, activation="gelu")


def test_a_kernel_that_cannot_be_launched_leaves_the_product_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tilewise.gpu.products import choose
    from tilewise.gpu.products.choose import Decided
    from tilewise.gpu.products.family import library_call

    class Broken:
        decided: ClassVar[dict[Problem, Decided]] = {}

        def decision(self, problem: Problem, measure: bool | str) -> Decided:
            return Decided(FAMILY.configs(problem)[1], False, 2.0)

        def run(self, problem: Problem, operands: Any, config: Config) -> None:
            if config != LIBRARY:
                raise RuntimeError("the driver says no")
            library_call(problem, operands)()

    monkeypatch.setattr(choose, "_gpu", Broken)
    a, b = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(24, 64, dtype=torch.bfloat16)
    assert torch.equal(matmul(a, b.T), a @ b.T)
    assert [found.config for found in Broken.decided.values()] == [LIBRARY]


def test_matrices_with_gaps_or_of_other_types_are_no_problem_of_the_kernels() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
    found = problem_of(a, b.T, None, None, "none")
    assert found is not None and found.word("layout") == "nt" and found.size("n") == 48
    assert problem_of(a[:, ::2], b[:, ::2].T, None, None, "none") is None
    assert problem_of(a.float(), b.T.float(), None, None, "none") is None
    assert problem_of(a, b.T, torch.zeros(47, dtype=torch.bfloat16), None, "bias") is None
