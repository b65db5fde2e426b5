"""Matrix products on a GPU, as far as they can be tested without one: fitting, prediction and choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tilewise.errors import ConfigurationError
from tilewise.gpu.products.call import matmul, problem_of
from tilewise.gpu.products.dispatch import choose_unmeasured, rank_kernels
from tilewise.gpu.products.family import MAX_PARTIAL_SUMS, ProductFamily, split_work, supports_tma, workspace_sizes
from tilewise.gpu.products.roofline import CUBLAS, columns, fits
from tilewise.gpu.products.runtime_model import RuntimeModel, required_gain, shipped_runtime_model
from tilewise.store.problem import Problem
from tools.drawn_products import KINDS, drawn_products

SHARED = 232_448
FAMILY = ProductFamily()


def _problems(count: int, seed: int = 7) -> list[Problem]:
    return [problem for _, problem in itertools.islice(drawn_products(seed), count)]


def _model() -> RuntimeModel:
    model = shipped_runtime_model()
    assert model is not None
    return model


def test_cublas_is_the_first_configuration_of_every_product() -> None:
    assert all(FAMILY.configs(problem)[0] == CUBLAS for problem in _problems(len(KINDS)))


def test_vectorised_fits_agrees_with_misfit() -> None:
    for problem in _problems(15):
        configs = FAMILY.configs(problem)[1:]
        at_once = fits(problem, columns(configs), SHARED, MAX_PARTIAL_SUMS)
        assert at_once.tolist() == [FAMILY.misfit(problem, config, SHARED) is None for config in configs]


def test_tma_is_not_used_for_unaligned_rows() -> None:
    for problem in _problems(25):
        if not supports_tma(problem):
            assert not any(config.get("tma") for config in FAMILY.configs(problem))


def test_split_work_covers_every_tile_once() -> None:
    for problem in _problems(20):
        for config in FAMILY.configs(problem)[1::7]:
            if FAMILY.misfit(problem, config, SHARED) is None:
                split_k, full_tiles, tiles = split_work(problem, config)
                assert 0 <= full_tiles <= tiles and split_k >= 1
                assert workspace_sizes(problem, config)[1] == (tiles - full_tiles if split_k > 1 else 0)
                steps = math.ceil(problem.size("k") / config.size("block_k"))
                assert math.ceil(steps / split_k) * (split_k - 1) < steps  # no slice of K is empty


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 65536, 8), (8192, 8192, 8192), (3, 5, 100_000), (100_000, 8, 64)])
def test_predictions_are_finite_for_extreme_sizes(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    problem = Problem.of("product", dtype="bf16", m=m, n=n, k=k, layout="nt", epilogue="none")
    prediction = _model().predict(problem, FAMILY.configs(problem))
    assert np.isfinite(prediction.seconds).all() and (prediction.seconds > 5e-7).all()
    assert (prediction.deviation >= 0).all()


def test_an_unmeasured_choice_fits_and_is_deterministic() -> None:
    for problem in _problems(20):
        first = choose_unmeasured(_model(), problem, SHARED)
        assert FAMILY.misfit(problem, first.config, SHARED) is None
        assert first == choose_unmeasured(_model(), problem, SHARED) and first.gain >= 1.0 and not first.is_measured


def test_without_tma_a_kernel_must_be_further_ahead() -> None:
    even, odd = (
        Problem.of("product", dtype="bf16", m=5718, n=1064, k=k, layout="nt", epilogue="none") for k in (504, 501)
    )
    assert supports_tma(even) and not supports_tma(odd) and required_gain(False, 0.08) > required_gain(True, 0.08)


def test_batch_invariant_kernels_do_not_split_k() -> None:
    for problem in _problems(12):
        if problem.word("dtype") != "tf32":
            configs, prediction = rank_kernels(_model(), problem, SHARED, 4, whole_k=True)
            assert configs and np.isfinite(prediction.seconds).all()
            assert all(workspace_sizes(problem, config) == (0, 0) for config in configs)


def test_kernels_are_ranked_by_predicted_time() -> None:
    problem = _problems(1)[0]
    configs, prediction = rank_kernels(_model(), problem, SHARED, 12)
    assert len(configs) == 12 and (np.diff(prediction.seconds) >= 0).all()
    assert all(FAMILY.misfit(problem, config, SHARED) is None for config in configs)


def test_tf32_is_ranked_like_bf16_with_twice_the_k_and_goes_to_cublas_unmeasured() -> None:
    bf16 = Problem.of("product", dtype="bf16", m=512, n=4096, k=2048, layout="nt", epilogue="none")
    tf32 = Problem({**bf16, "dtype": "tf32", "k": 1024})
    (configs, prediction), (bf16_configs, bf16_prediction) = (
        rank_kernels(_model(), problem, SHARED, 8) for problem in (tf32, bf16)
    )
    assert [{**c, "block_k": 2 * c.size("block_k")} for c in configs] == [dict(c) for c in bf16_configs]
    assert np.array_equal(prediction.seconds, bf16_prediction.seconds)
    assert all(FAMILY.misfit(tf32, config, SHARED) is None for config in configs)
    assert choose_unmeasured(_model(), tf32, SHARED).config == CUBLAS


def test_float32_matrices_use_tf32_if_pytorch_allows_it() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    assert problem_of(a, b, None, None, "none") is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        problem = problem_of(a, b, None, None, "none")
    finally:
        torch.set_float32_matmul_precision(before)
    assert problem is not None and problem.word("dtype") == "tf32"


def test_without_a_gpu_pytorch_computes_the_product() -> None:
    torch = pytest.importorskip("torch")
    a, b, bias = torch.randn(6, 16), torch.randn(16, 8), torch.randn(8)
    assert torch.equal(matmul(a, b), a @ b)
    assert torch.allclose(matmul(a, b, bias, activation="relu"), torch.relu(torch.addmm(bias, a, b)))
    with pytest.raises(ConfigurationError, match="needs a bias"):
        matmul(a, b, activation="gelu")


def test_strided_matrices_and_other_dtypes_are_not_supported() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
    problem = problem_of(a, b.T, None, None, "none")
    assert problem is not None and problem.word("layout") == "nt" and problem.size("n") == 48
    assert problem_of(a[:, ::2], b[:, ::2].T, None, None, "none") is None
    assert problem_of(a.float(), b.T.float(), None, None, "none") is None
    assert problem_of(a, b.T, torch.zeros(47, dtype=torch.bfloat16), None, "bias") is None
