"""The native matmul against NumPy in double precision: every instruction set, any shape, stride, tile, thread count."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._environment import MachineOverride
from tilewise._extension import native
from tilewise.backend import TileConfig, check_tile, default_matmul_tile, matmul_native, tile_space
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, TilewiseError

pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled kernels")

ISAS = native.supported_isas() if native is not None else []
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 13, 14, 15, 16, 17, 29, 31, 32, 33, 47, 48, 61, 64, 65, 97, 131, 257])
SETTINGS = settings(derandomize=True, deadline=None, max_examples=250)


@pytest.fixture(autouse=True)
def _restore_native() -> Iterator[None]:
    isa, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(threads)


def view(rng: np.random.Generator, rows: int, cols: int, kind: str) -> np.ndarray:
    """A rows x cols float32 array laid out in memory as `kind` says."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    match kind:
        case "rows":
            return draw(rows, cols)
        case "columns":
            return draw(cols, rows).T
        case "window":
            return draw(rows + 3, cols + 5)[2 : 2 + rows, 1 : 1 + cols]
        case "backwards":
            return draw(rows, cols)[::-1, ::-1]
        case "strided":
            return draw(rows * 2, cols * 3)[::2, ::3]
        case "repeated":
            return np.broadcast_to(draw(1, cols), (rows, cols))
    raise AssertionError(kind)


KINDS = st.sampled_from(["rows", "columns", "window", "backwards", "strided", "repeated"])


def assert_product(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    bound = np.matmul(np.abs(a).astype(np.float64), np.abs(b).astype(np.float64))
    assert c.shape == exact.shape and c.dtype == np.float32
    assert np.all(np.abs(c - exact) <= bound * 2e-6 + 1e-30)


@pytest.mark.parametrize("isa", ISAS)
@SETTINGS
@given(
    m=SIZES, n=SIZES, k=SIZES, a_kind=KINDS, b_kind=KINDS, threads=st.sampled_from([1, 2, 7]), seed=st.integers(0, 9)
)
def test_any_shape_and_stride_gives_the_product(isa, m, n, k, a_kind, b_kind, threads, seed):
    native.set_isa(isa)
    native.set_num_threads(threads)
    rng = np.random.default_rng(seed)
    a, b = view(rng, m, k, a_kind), view(rng, k, n, b_kind)
    assert_product(matmul_native(a, b), a, b)


@pytest.mark.parametrize("isa", ISAS)
@SETTINGS
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_tile_of_the_space_gives_the_product(isa, data, seed):
    native.set_isa(isa)
    native.set_num_threads(2)
    m, n, k = (data.draw(st.integers(1, 150)) for _ in range(3))
    layout = data.draw(st.sampled_from(["nn", "nt", "tn", "tt"]))
    threads = data.draw(st.sampled_from([1, 2, 6]))
    space = tile_space("matmul", (m, n, k), layout=layout, threads=threads)
    assert space
    tile = data.draw(st.sampled_from(space))
    rng = np.random.default_rng(seed)
    a = view(rng, m, k, "rows" if layout[0] == "n" else "columns")
    b = view(rng, k, n, "rows" if layout[1] == "n" else "columns")
    assert_product(matmul_native(a, b, tile), a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", range(2, 10))
def test_few_rows_by_a_matrix_from_memory_give_the_product(isa, m, another_machine):
    another_machine(MachineOverride(l1=32 << 10, l3=1 << 16))
    native.set_isa(isa)
    rng = np.random.default_rng(m)
    for n, k, kind in [(512, 129, "rows"), (517, 130, "columns"), (1031, 71, "window"), (4100, 17, "strided")]:
        a, b = view(rng, m, k, kind), view(rng, k, n, "window" if kind == "window" else "rows")
        native.set_num_threads(1)
        c = matmul_native(a, b)
        assert_product(c, a, b)
        native.set_num_threads(3)
        assert np.array_equal(matmul_native(a, b), c)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("batch_a, batch_b", [((3,), (3,)), ((2, 1), (1, 4)), ((5,), ()), ((), (3, 2)), ((0,), (1,))])
def test_batches_broadcast_as_in_numpy(isa, batch_a, batch_b):
    native.set_isa(isa)
    rng = np.random.default_rng(1)
    for m, k, n in [(4, 6, 5), (1, 9, 3), (20, 33, 40)]:
        a = rng.standard_normal((*batch_a, m, k)).astype(np.float32)
        b = rng.standard_normal((*batch_b, k, n)).astype(np.float32)
        assert_product(matmul_native(a, b), a, b)
        assert_product(matmul_native(np.swapaxes(np.swapaxes(a, -1, -2).copy(), -1, -2), b), a, b)


def test_vectors_are_rows_on_the_left_and_columns_on_the_right():
    rng = np.random.default_rng(2)
    v, w = rng.standard_normal(31).astype(np.float32), rng.standard_normal(31).astype(np.float32)
    m = rng.standard_normal((31, 17)).astype(np.float32)
    batch = rng.standard_normal((4, 5, 31)).astype(np.float32)
    for a, b in [(v, m), (m.T, v), (v, w), (batch, v), (v[::-1], m), (m.T, w[::-1])]:
        assert_product(np.asarray(matmul_native(a, b)), a, b)


def reference_epilogue(x, bias, residual, activation):
    from math import erf

    x = x.astype(np.float64) + (0 if bias is None else bias) + (0 if residual is None else residual)
    if activation == "relu":
        return np.maximum(x, 0)
    return x * 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))) if activation == "gelu" else x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize(
    "shape",
    [(5, 7, 9), (1, 40, 70), (40, 20, 1), (3, 65, 130), (33, 600, 35), (4, 0, 3), (40, 20, 3), (50, 6, 30), (4, 90, 7)],
)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_epilogues_are_bias_then_residual_then_activation(isa, activation, shape, batch):
    native.set_isa(isa)
    m, k, n = shape
    rng = np.random.default_rng(3)
    a = rng.standard_normal((*batch, m, k)).astype(np.float32)
    b = (rng.standard_normal((*batch, k, n)) / np.sqrt(max(k, 1))).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((*batch, m, n)).astype(np.float32)
    for used_bias, used_residual in [(bias, residual), (None, residual), (bias, None)]:
        output = matmul_native(a, b, bias=used_bias, residual=used_residual, activation=activation)
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
        np.testing.assert_allclose(
            output, reference_epilogue(exact, used_bias, used_residual, activation), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "shape", [(20, 30, 40), (1, 50, 60), (60, 50, 1), (2, 64, 7), (40, 20, 3), (50, 6, 30), (4, 90, 7)]
)
def test_not_a_number_and_infinity_reach_the_result(isa, shape):
    native.set_isa(isa)
    m, k, n = shape
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    a[0, k - 1] = np.nan
    assert np.isnan(matmul_native(a, b)[0]).all()
    assert np.isnan(matmul_native(a, b, activation="relu")[0]).all()
    a[0, k - 1] = np.inf
    assert np.isposinf(matmul_native(a, b)[0]).all()
    a[0, k - 1] = 3e38
    assert np.isposinf(matmul_native(a, np.full((k, n), 1e30, np.float32))[0]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(100, 700, 90), (1, 3000, 700), (700, 3000, 1), (3, 900, 500), (150, 64, 150)])
def test_the_number_of_threads_never_changes_a_bit(isa, shape):
    native.set_isa(isa)
    m, k, n = shape
    rng = np.random.default_rng(4)
    a, b = view(rng, m, k, "rows"), view(rng, k, n, "columns")
    for left, right in [(a, b), (a, b.copy()), (a.T.copy().T, b.copy())]:
        native.set_num_threads(1)
        alone = matmul_native(left, right)
        for threads in (2, 3, 7):
            native.set_num_threads(threads)
            np.testing.assert_array_equal(matmul_native(left, right), alone)


def test_several_python_threads_may_call_at_once():
    rng = np.random.default_rng(5)
    native.set_num_threads(2)
    pairs = [(view(rng, 90, 110, "rows"), view(rng, 110, 130, "columns")) for _ in range(4)]
    expected = [matmul_native(a, b) for a, b in pairs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            if not np.array_equal(matmul_native(*pairs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_inputs_are_left_alone_and_the_result_owns_its_memory():
    a, b = np.ones((5, 6), np.float32), np.ones((6, 7), np.float32)
    a.flags.writeable = False
    c = matmul_native(a, b)
    c[:] = 9
    assert (a == 1).all() and (b == 1).all() and c.flags.c_contiguous and c.flags.owndata


F = np.float32


@pytest.mark.parametrize(
    "args, kwargs, error, words",
    [
        ((np.ones((2, 3)), np.ones((3, 2), F)), {}, DtypeError, "float64"),
        ((np.ones((2, 3), F), np.ones((3, 2), ">f4")), {}, DtypeError, "byte order"),
        (([[1.0]], np.ones((1, 1), F)), {}, DtypeError, "list"),
        ((np.ones((2, 3), F), np.ones((2, 3), F)), {}, ShapeError, r"\(2, 3\)"),
        ((np.float32(1), np.ones((2, 3), F)), {}, DtypeError, "float32"),
        ((np.array(1, F), np.ones((2, 3), F)), {}, ShapeError, "dimensions"),
        ((np.ones((2, 2, 3), F), np.ones((3, 3, 4), F)), {}, ShapeError, "shapes"),
        ((np.ones((2, 3), F), np.ones((3, 4), F)), {"bias": np.ones(3, F)}, ShapeError, "4 elements"),
        ((np.ones((2, 3), F), np.ones((3, 4), F)), {"residual": np.ones((4, 2), F)}, ShapeError, "residual"),
        ((np.ones((2, 3), F), np.ones((3, 4), F)), {"activation": "tanh"}, ConfigurationError, "tanh"),
        ((np.ones((2, 3), F), np.ones((3, 4), F)), {"speed": 1}, ConfigurationError, "speed"),
        ((np.ones((2, 3), F), np.ones((3, 4), F)), {"tile": 7}, ConfigurationError, "TileConfig"),
        ((np.ones((2, 3), F),), {}, ConfigurationError, "two arrays"),
    ],
)
def test_bad_arguments_get_one_sentence(args, kwargs, error, words):
    with pytest.raises(error, match=words) as caught:
        matmul_native(*args, **kwargs)
    assert isinstance(caught.value, TilewiseError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"mr": 40}, "register"),
        ({"mr": 0}, "register"),
        ({"nr": 17}, "vectors"),
        ({"mc": 1}, "mc must be at least mr"),
        ({"nc": 1}, "nc must be at least nr"),
        ({"kc": 0}, "kc must be positive"),
        ({"kc": 2**40}, "kc"),
        ({"mc": 2**20, "kc": 2**20}, "L2 cache"),
        ({"threads_m": 0}, "threads"),
        ({"mr": -3}, "register"),
    ],
)
def test_an_infeasible_tile_is_refused_with_the_reason(fields, words):
    a, b = np.zeros((3000, 3000), F), np.zeros((3000, 64), F)
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    good = {"mr": 2, "nr": lanes, "mc": 64, "nc": 64, "kc": 64}
    matmul_native(a, b, TileConfig(**good))
    bad = TileConfig(**{**good, **fields})
    with pytest.raises(ConfigurationError, match=words):
        matmul_native(a, b, bad)
    with pytest.raises(ConfigurationError, match=words):
        check_tile("matmul", (3000, 64, 3000), bad)


def test_an_unpacked_transposed_b_is_refused():
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    tile = TileConfig(2, lanes, 64, 64, 64, pack_b=False)
    with pytest.raises(ConfigurationError, match="packed"):
        matmul_native(np.ones((8, 9), F), np.ones((70, 9), F).T, tile)


def test_there_are_hundreds_of_feasible_tiles_at_512():
    space = tile_space("matmul", (512, 512, 512), threads=1)
    assert len(space) >= 200 and len(set(space)) == len(space)


def test_a_tile_space_refuses_what_it_does_not_know():
    for op, shape, layout in [("conv", (1, 1, 1), "nn"), ("matmul", (1, 0, 1), "nn"), ("matmul", (1, 1, 1), "xx")]:
        with pytest.raises(ConfigurationError):
            tile_space(op, shape, layout=layout)


@pytest.mark.parametrize("isa", native.supported_isas() if native is not None else [])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_narrow_products_of_every_path_are_right_and_do_not_depend_on_threads(isa: str, layout: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(0)
    sizes = [
        (m, n, k)
        for m in (1, 2, 3, 4, 33)
        for n in (1, 2, 3, 5, 7, 8, 9, 13, 17, 20, 24)
        for k in (1, 3, 8, 9, 30, 129)
    ]
    wide = [(2, 1024, 130), (3, 700, 300), (1500, 2, 40), (5, 1500, 40), (12, 40, 600), (8, 16, 300), (6, 4, 1000)]
    shared = [(9000, 4, 32), (30000, 5, 8), (3, 9000, 45), (300, 500, 12)]  # by several threads
    for m, n, k in [*sizes, *wide, *shared]:
        a, b = rng.standard_normal((m, k)).astype(F), rng.standard_normal((k, n)).astype(F)
        left = np.asfortranarray(a) if layout[0] == "t" else a
        right = np.asfortranarray(b) if layout[1] == "t" else b
        native.set_num_threads(1)
        output = matmul_native(left, right)
        exact = a.astype(np.float64) @ b
        assert np.abs(output - exact).max() <= 1e-5 * max(1.0, np.abs(exact).max()), (m, n, k)
        native.set_num_threads(7)
        np.testing.assert_array_equal(matmul_native(left, right), output, err_msg=str((m, n, k)))


@pytest.mark.parametrize("isa", native.supported_isas() if native is not None else [])
@pytest.mark.parametrize("threads", [2, 3, 4, 6])
@pytest.mark.parametrize("shape", [(192, 192, 192), (196, 320, 672), (333, 333, 333), (150, 576, 150), (128, 704, 300)])
def test_the_default_shares_a_product_out_as_evenly_as_any_grid(isa: str, threads: int, shape: tuple[int, ...]) -> None:
    native.set_isa(isa)
    m, n, k = shape
    path, default = native.matmul_plan(np.empty((m, k), F), np.empty((k, n), F), threads)
    assert path == "tiled"
    tile = TileConfig(*default)

    def largest(threads_m: int, threads_n: int) -> int:
        rows, cols = -(-m // threads_m), -(-n // threads_n)
        return min(-(-rows // tile.mr) * tile.mr, m) * min(-(-cols // tile.nr) * tile.nr, n)

    grids = [largest(count, threads // count) for count in range(1, threads + 1) if threads % count == 0]
    each, remainder = divmod(tile.threads_m * tile.threads_n, threads)
    assert remainder == 0
    assert each * largest(tile.threads_m, tile.threads_n) <= 1.1 * min(grids)  # a little more where it packs less


@pytest.mark.parametrize("isa", ISAS)
def test_a_matrix_is_packed_where_many_rows_read_it_and_a_small_one_never(isa: str) -> None:
    native.set_isa(isa)
    a, b = np.ones((512, 1100), F), np.ones((1100, 2100), F)
    packs = [default_matmul_tile(a[:rows], b).pack_b for rows in (4, 16, 64, 193, 300, 512)]
    assert packs == sorted(packs)  # what is packed for some rows is packed for more
    assert packs[-1] and not packs[0]
    assert not default_matmul_tile(a[:300, :100], np.ascontiguousarray(b[:100, :100])).pack_b


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_any_number_of_threads_gives_the_same_bits_where_b_is_packed_once_for_all(isa: str, layout: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(6)
    for m, n, k in [(257, 1025, 300), (513, 511, 1030), (300, 1024, 512), (200, 385, 1600), (130, 66, 900)]:
        a, b = rng.standard_normal((m, k)).astype(F), rng.standard_normal((k, n)).astype(F)
        a[1, 2], b[3, 4] = np.nan, np.inf
        left = np.asfortranarray(a) if layout[0] == "t" else a
        right = np.asfortranarray(b) if layout[1] == "t" else b
        native.set_num_threads(1)
        one = matmul_native(left, right)
        with np.errstate(invalid="ignore"):
            exact = a.astype(np.float64) @ b
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=1e-3)
        for threads in (2, 3, 16, 64):
            native.set_num_threads(threads)
            np.testing.assert_array_equal(matmul_native(left, right), one, err_msg=f"{m}x{n}x{k}, {threads} threads")


def test_a_given_tile_gives_the_same_bits_however_its_grid_shares_b() -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(shape).astype(F) for shape in ((515, 700), (700, 530)))
    nr = native.gemm_register_tiles()[0][1]
    one = matmul_native(a, b, tile=TileConfig(4, nr, 64, 4 * nr, 128, True, True))
    native.set_num_threads(4)
    for grid in [(1, 4), (2, 2), (4, 1), (16, 3), (3, 16)]:
        np.testing.assert_array_equal(
            matmul_native(a, b, tile=TileConfig(4, nr, 64, 4 * nr, 128, True, True, *grid)), one
        )
    np.testing.assert_allclose(one, a.astype(np.float64) @ b, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_last_columns_is_right_where_b_is_packed_once_for_all(isa: str) -> None:
    native.set_isa(isa)
    native.set_num_threads(2)
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(shape).astype(F) for shape in ((130, 300), (300, 162)))
    exact = a.astype(np.float64) @ b
    for mr, nr in {nr: (mr, nr) for mr, nr in native.gemm_register_tiles()}.values():
        for n in range(129, 163):
            tile = TileConfig(mr, nr, 4 * mr, 4 * nr, 128, False, True, 2, 1)
            np.testing.assert_allclose(matmul_native(a, b[:, :n], tile=tile), exact[:, :n], atol=1e-3, err_msg=f"{n}")


def test_the_compiled_product_shows_its_signature_and_what_it_does():
    assert list(inspect.signature(matmul_native).parameters) == ["a", "b", "tile", "bias", "activation", "residual"]
    assert "TileConfig" in (inspect.getdoc(matmul_native) or "")
