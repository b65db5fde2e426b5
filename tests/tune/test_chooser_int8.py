"""Tiles for products of integers: those that were tuned, and the same integers whichever is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, models, nn
from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.backend.tiled import tiled_op
from tilewise.backend.tiled.int8_matmul import Int8Tile
from tilewise.errors import ConfigurationError
from tilewise.quantize import quantize
from tilewise.quantize.layers import QuantizedLinear
from tilewise.store.problem import Config
from tilewise.tune.choose.cache import ChoiceFile, Decision

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.choose.tuned_table import TunedTable, key_of, load_tuned_table
    from tilewise.tune.families.cpu.family import get_family
    from tilewise.tune.families.cpu.int8_matmul import config_of
    from tilewise.tune.measure.cpu.device import CpuDevice

SHAPES = [(1, 1, 1), (1, 37, 50), (3, 16, 4), (7, 33, 129), (17, 100, 31), (50, 5, 260), (65, 70, 67)]


def nobody(*question: Any) -> None:
    raise AssertionError(f"products of integers are not asked about: {question}")


class Tuned:
    """A chooser that knows tiles beforehand: (m, n, k, threads) -> tile."""

    def __init__(self, tiles: dict[tuple[int, int, int, int], Int8Tile]) -> None:
        self.tiles = tiles

    __call__ = staticmethod(nobody)

    def preload(self, table: Any) -> None:
        for (*shape, threads), tile in self.tiles.items():
            table.keep_int8(tuple(shape), threads, tile)


def layer_and_input(m: int, n: int, k: int, seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = rng.integers(-128, 128, (n, 1, 1, k), dtype=np.int8)
    offset = rng.integers(-1000, 1000, n, dtype=np.int32)
    scale = rng.uniform(1e-4, 1e-2, n).astype(np.float32)
    layer = native.Int8Layer(weights, offset, scale, rng.standard_normal(n, dtype=np.float32), (1, 1), (0, 0))
    layer.set_output(117, 0, 255)
    x = rng.integers(0, 256, (m, -(-k // 4) * 4), dtype=np.uint8)
    return layer, x, rng.uniform(0.5, 1.5, m).astype(np.float32)


def some_tiles(shape: tuple[int, int, int], threads: int, count: int = 6) -> list[Int8Tile]:
    space = tiled_op("int8_matmul").space(native, shape, None, threads)
    return [space[int(i)] for i in np.linspace(0, len(space) - 1, count)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kept_tile_gives_the_same_bits_on_every_instruction_set_and_thread_count(shape, settings_restored):
    layer, x, row_scale = layer_and_input(*shape)
    native.set_num_threads(1)
    expected = [layer.linear(x, kind, row_scale if kind == 1 else None, kind == 1) for kind in (0, 1, 2)]
    for isa in native.supported_isas():
        native.set_isa(isa)
        for threads in (1, 2):
            native.set_num_threads(threads)
            for tile in some_tiles(shape, threads):
                table = native.TileTable(nobody)
                table.keep_int8(shape, threads, tile)
                for kind in (0, 1, 2):
                    output = layer.linear(x, kind, row_scale if kind == 1 else None, kind == 1, None, table)
                    np.testing.assert_array_equal(output, expected[kind], err_msg=f"{isa}, {threads} threads, {tile}")


@pytest.mark.parametrize(
    "arguments",
    [
        ((4, 4), 1, Int8Tile(1, 16, 1, 16, 4)),
        ((4, 4, 4), 0, Int8Tile(1, 16, 1, 16, 4)),
        ((4, 4, 4), 1, None),
        ((4, 4, 4), 1, "tile"),
        ((4, 4, 4), 1, Int8Tile(99, 16, 99, 16, 4)),
        ((4, 4, 4), 1),
    ],
)
def test_what_cannot_be_kept_is_one_sentence(arguments):
    with pytest.raises((ConfigurationError, TypeError, ValueError)) as error:
        native.TileTable(nobody).keep_int8(*arguments)
    assert len(str(error.value).splitlines()) == 1


def test_only_a_table_is_taken_for_a_table():
    layer, x, _ = layer_and_input(4, 4, 4)
    with pytest.raises(TypeError, match="TileTable"):
        layer.linear(x, 0, None, False, None, 7)


# --- whole models ---


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5, 300])
def test_a_quantized_model_gives_the_same_bits_with_other_tiles(threads, batch, settings_restored):
    x = np.random.default_rng(0).standard_normal((batch, 64)).astype(np.float32)
    model = quantize(models.mlp().eval(), [x], max_error=None)
    expected = model(x).data
    native.set_num_threads(threads)
    products = model.products(x)
    for index in (0, 1, 3):
        tiles = {(p.m, p.n, p.k, p.threads): some_tiles((p.m, p.n, p.k), 1)[index] for p in products}
        with use_backend(OptimizedBackend(tile_chooser=Tuned(tiles))) as backend:
            np.testing.assert_array_equal(model(x).data, expected)
        assert len(backend.tiles) == len(tiles) >= 3


def test_a_model_tells_its_products_as_they_run(settings_restored):
    x = np.random.default_rng(0).standard_normal((255, 64)).astype(np.float32)
    model = quantize(models.mlp().eval(), [x], max_error=None)
    native.set_num_threads(2)
    products = model.products(x)
    assert {(p.n, p.k) for p in products} == {(256, 64), (128, 256), (10, 128)}
    assert {p.m for p in products} == {127, 128} and {p.threads for p in products} == {1}
    assert {model.graph.steps[p.step].kind for p in products} == {"linear"}
    (first, *_) = model.products(x[:1])
    assert (first.m, first.threads) == (1, 2)  # nothing to share but the product itself


def test_a_dynamic_layer_gives_the_same_bits_with_another_tile(settings_restored):
    native.set_num_threads(1)
    layer = QuantizedLinear.from_float(nn.Linear(60, 50))
    x = np.random.default_rng(0).standard_normal((40, 60)).astype(np.float32)
    expected = layer(Tensor(x)).data
    tiles = {(40, 50, 60, 1): some_tiles((40, 50, 60), 1)[-1]}
    with use_backend(OptimizedBackend(tile_chooser=Tuned(tiles))):
        np.testing.assert_array_equal(layer(Tensor(x)).data, expected)


def test_nobody_is_asked_about_integers_that_were_not_tuned(settings_restored):
    native.set_num_threads(1)
    layer = QuantizedLinear.from_float(nn.Linear(60, 50))
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    model = quantize(models.mlp().eval(), [x], max_error=None)
    for tiles in ({}, {(1, 1, 1, 1): Int8Tile(1, 16, 1, 16, 4)}):
        with use_backend(OptimizedBackend(tile_chooser=Tuned(tiles))) as backend:
            layer(Tensor(x[:, :60]))
            model(x)
        assert len(backend.tiles) == len(tiles)


# --- the tuner's choices ---


def chooser_that_knows(folder: Path, config: Config) -> TunedTable:
    bench = CpuDevice()
    spec = {"family": "int8_matmul", "m": 90, "n": 80, "k": 70, "threads": 1, "epilogue": "bias"}
    problem = get_family("int8_matmul").problem(spec)
    ChoiceFile(folder, bench.machine.identity, bench.version).put(
        Decision(problem, config, "measured", 1.0, None, 3, True)
    )
    assert key_of(problem, 1) == ("int8_matmul", (90, 80, 70), "int8", "packed")
    return load_tuned_table(native, folder)[0]


def test_a_tuned_choice_is_in_the_table_from_the_start(tmp_path, settings_restored):
    native.set_num_threads(1)
    tile, tiles = some_tiles((90, 80, 70), 1)[-1], []
    chooser = chooser_that_knows(tmp_path, config_of(tile))
    assert len(OptimizedBackend(tile_chooser=chooser).tiles) == 1

    class Table:
        def keep_int8(self, *choice: Any) -> None:
            tiles.append(choice)

    chooser.preload(Table())
    assert tiles == [((90, 80, 70), 1, tile)]


def test_a_choice_that_is_not_feasible_any_more_is_not_used(tmp_path):
    nonsense = Config({**config_of(tiled_op("int8_matmul").default(native, (90, 80, 70), None, 1)), "register_m": 99})
    chooser = chooser_that_knows(tmp_path, nonsense)
    assert len(OptimizedBackend(tile_chooser=chooser).tiles) == 0
