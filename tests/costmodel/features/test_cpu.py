"""The CPU model's features: the same on every machine where the ratios are, and never a number that is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.costmodel.features.cpu import INPUT_COLUMNS, CpuFeatures, as_product
from tilewise.costmodel.hlo.operations import conv_graph, int8_matmul_graph, matmul_graph
from tilewise.errors import FileFormatError

SCHEMA = Schema((*TILE_FEATURES, *INPUT_COLUMNS))
MACHINE = {
    "machine_lanes": 8, "machine_registers": 16, "machine_l1_kib": 32, "machine_l2_kib": 512,
    "machine_l3_share_kib": 4096, "machine_mflops": 100_000, "machine_l1_mbs": 100_000, "machine_l2_mbs": 60_000,
    "machine_l3_mbs": 40_000, "machine_memory_mbs": 20_000,
}  # fmt: skip


def rows(count: int, machine: dict[str, int], bounds: tuple[int, ...] = (64, 64, 64)) -> np.ndarray:
    feat = np.zeros((count, SCHEMA.width), np.float32)
    for start in (0, 8, 16):
        feat[:, start : start + len(bounds)] = bounds
    own = {"register_m": 6, "register_n": 16, "threads_m": 1, "threads_n": 1, "threads": 1, **machine}
    for name, value in own.items():
        feat[:, SCHEMA.config_features.index(name)] = value
    feat[0, SCHEMA.config_features.index("default")] = 1
    feat[:, SCHEMA.config_features.index("register_m")] = 1 + np.arange(count)
    return feat


def kernel(graph, feat: np.ndarray, name: str = "p_1") -> Kernel:
    runtime = np.arange(1, len(feat) + 1) * 1000
    return make_kernel(name, *graph, feat, runtime, np.full(len(feat), 1000))


GRAPHS = {
    "product": matmul_graph("fp32", (0, 100, 200, 300), "nt", "bias_gelu"),
    "batch": matmul_graph("fp32", (4, 10, 20, 30), "nn", "none"),
    "bytes": int8_matmul_graph(10, 20, 30, "requantize"),
    "convolution": conv_graph((2, 3, 16, 16), (8, 3, 3, 3), (1, 1), (1, 1), 1, "residual"),
}


def test_the_product_is_read_from_the_graph():
    product = as_product(kernel(GRAPHS["product"], rows(2, MACHINE)))
    assert (product.m, product.n, product.k, product.element_bytes) == (100, 200, 300, 4)
    assert product.b_transposed and not product.a_transposed and product.slow_epilogue
    small = as_product(kernel(GRAPHS["bytes"], rows(2, MACHINE)))
    assert (small.m, small.n, small.k, small.element_bytes) == (10, 20, 30, 1)
    batch = as_product(kernel(GRAPHS["batch"], rows(2, MACHINE)))
    assert (batch.batch, batch.m, batch.n, batch.k) == (4, 10, 20, 30)
    convolution = as_product(kernel(GRAPHS["convolution"], rows(2, MACHINE)))
    assert convolution.convolution and (convolution.m, convolution.n, convolution.k) == (256, 8, 27)
    assert convolution.epilogue_reads == 1.0


@pytest.mark.parametrize("name", sorted(GRAPHS))
@pytest.mark.parametrize("machine", [MACHINE, {}, {"machine_lanes": 16, "machine_l2_kib": 2048}])
def test_every_feature_is_a_number_whatever_is_known_of_the_machine(name, machine):
    data = dataset_from_kernels([kernel(GRAPHS[name], rows(5, machine))], [], [], SCHEMA)
    prepared = CpuFeatures.fit(data.train).apply(data.train[0])
    assert prepared.config.shape[0] == 5 and np.isfinite(prepared.config).all()


def test_a_machine_twice_as_fast_in_everything_looks_the_same():
    fast = {name: value * 2 if name.endswith(("mflops", "mbs")) else value for name, value in MACHINE.items()}
    one, other = (kernel(GRAPHS["product"], rows(4, machine)) for machine in (MACHINE, fast))
    features = CpuFeatures.fit(dataset_from_kernels([one], [], [], SCHEMA).train)
    np.testing.assert_allclose(features.raw(one), features.raw(other), rtol=1e-5)


def test_a_larger_cache_shows():
    large = MACHINE | {"machine_l2_kib": 2048}
    one, other = (kernel(GRAPHS["product"], rows(4, machine)) for machine in (MACHINE, large))
    features = CpuFeatures.fit(dataset_from_kernels([one], [], [], SCHEMA).train)
    assert (features.raw(one) != features.raw(other)).any()


def test_other_columns_are_refused_with_a_sentence():
    features = CpuFeatures.fit(dataset_from_kernels([kernel(GRAPHS["batch"], rows(4, MACHINE))], [], [], SCHEMA).train)
    with pytest.raises(FileFormatError, match="other columns"):
        features.apply(kernel(GRAPHS["batch"], np.ones((2, 24), np.float32)))


def test_the_model_learns_what_it_is_shown_and_is_the_same_when_read_again(tmp_path: Path):
    from tilewise.costmodel.models.ridge import ridge_scorer
    from tilewise.costmodel.models.scorer import load_scorer

    kernels = [kernel(graph, rows(12, MACHINE), f"{name}_1") for name, graph in GRAPHS.items()]
    model = ridge_scorer(kernels * 20, SCHEMA, seed=3)
    model.save(tmp_path / "m.safetensors")
    again = load_scorer(tmp_path / "m.safetensors")
    for one in kernels:
        assert np.corrcoef(model.score(one), np.log(one.target))[0, 1] > 0.9
        np.testing.assert_array_equal(model.score(one), again.score(one))
        np.testing.assert_allclose(again.exact(one, np.arange(3)), again.score(one)[:3], rtol=1e-3, atol=1e-4)
    same = ridge_scorer(kernels * 20, SCHEMA, seed=3)
    np.testing.assert_array_equal(same.score(kernels[0]), model.score(kernels[0]))
