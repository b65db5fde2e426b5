"""The table of a chooser's answers inside the compiled calls: who is asked, when, how often, and what then runs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend import OptimizedBackend, TileConfig, current_backend, use_backend
from tilewise.errors import ConfigurationError
from tilewise.profile import ProfilerContext
from tilewise.tensor import Tensor

pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
Key = tuple[Any, ...]


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)


def odd_tile() -> TileConfig:
    """One whose sums come out otherwise than the default's."""
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    return TileConfig(2, lanes, 8, lanes, 5, pack_a=False)


class RecordingChooser:
    """A chooser that says one thing and remembers who asked."""

    def __init__(self, tile: Any = None) -> None:
        self.tile, self.keys = tile, list[Key]()

    def __call__(self, *key: Any) -> Any:
        self.keys.append(key)
        return self.tile


def test_a_shape_is_asked_about_once_and_its_tile_used_at_every_call() -> None:
    chooser = RecordingChooser(odd_tile())
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    expected = native.matmul(a, b, chooser.tile)
    for _ in range(3):
        np.testing.assert_array_equal(backend.dispatch("matmul", a, b), expected)
    assert chooser.keys == [("matmul", (60, 50, 40), "float32", "nn")]
    assert not np.array_equal(expected, native.matmul(a, b)), "the tile rounds otherwise"
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b, tile=None), native.matmul(a, b))
    biased = backend.dispatch("matmul", a, b, bias=np.ones(50, np.float32))
    np.testing.assert_array_equal(biased, native.matmul(a, b, chooser.tile, bias=np.ones(50, np.float32)))


def test_every_layout_is_a_shape_of_its_own() -> None:
    chooser = RecordingChooser()
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    turned_a, turned_b = np.asfortranarray(a), np.asfortranarray(b)
    for left, right in ((a, b), (a, turned_b), (turned_a, b), (turned_a, turned_b), (a, b)):
        backend.dispatch("matmul", left, right)
    assert [key[3] for key in chooser.keys] == ["nn", "nt", "tn", "tt"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((20, 20), (20, 20)),  # tiny
        ((3, 500), (500, 500)),  # few rows
        ((500, 500), (500, 4)),  # few columns
        ((500, 12), (12, 500)),  # short sums
        ((6, 60, 50), (6, 50, 40)),  # several products
    ],
)
def test_nobody_is_asked_where_tiles_do_not_decide(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    chooser = RecordingChooser(odd_tile())
    backend = OptimizedBackend(tile_chooser=chooser)
    a, b = np.ones(left, np.float32), np.ones(right, np.float32)
    np.testing.assert_allclose(backend.dispatch("matmul", a, b), a @ b)
    backend.explain("matmul", a, b)
    assert chooser.keys == []


def test_a_batch_that_shares_its_weights_is_one_taller_product() -> None:
    chooser = RecordingChooser()
    x, w = np.ones((4, 30, 50), np.float32), np.ones((50, 40), np.float32)
    OptimizedBackend(tile_chooser=chooser).dispatch("matmul", x, w)
    assert chooser.keys == [("matmul", (120, 40, 50), "float32", "nn")]


def test_operands_with_gaps_both_ways_are_not_given_a_tile_that_cannot_read_them() -> None:
    lanes = min(nr for _, nr in native.gemm_register_tiles())
    chooser = RecordingChooser(TileConfig(2, lanes, 8, lanes, 50, pack_a=False, pack_b=False))
    a, wide = operands(60, 100, 40)
    b = wide[:, ::2]
    np.testing.assert_allclose(OptimizedBackend(tile_chooser=chooser).dispatch("matmul", a, b), a @ b, atol=1e-4)
    assert chooser.keys == []


def test_answers_belong_to_a_thread_count_and_an_instruction_set() -> None:
    chooser = RecordingChooser()
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    threads, isa = native.num_threads(), native.isa()
    try:
        for count in (1, 2, 1, 2):
            native.set_num_threads(count)
            backend.dispatch("matmul", a, b)
        assert len(chooser.keys) == 2
        for name in native.supported_isas():
            native.set_isa(name)
            backend.dispatch("matmul", a, b)
        assert len(chooser.keys) == 2 + len(native.supported_isas()) - 1
    finally:
        native.set_num_threads(threads)
        native.set_isa(isa)


def test_a_replaced_chooser_is_asked_anew_and_none_gives_the_default_back() -> None:
    first, second = RecordingChooser(odd_tile()), RecordingChooser()
    backend, (a, b) = OptimizedBackend(tile_chooser=first), operands(60, 50, 40)
    for chooser in (second, None, first):
        backend.dispatch("matmul", a, b)
        backend.tile_chooser = chooser
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b), native.matmul(a, b, first.tile))
    assert (len(first.keys), len(second.keys)) == (2, 1)
    backend.tile_chooser = None
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b), native.matmul(a, b))


def test_backends_do_not_share_answers() -> None:
    a, b = operands(60, 50, 40)
    one, other, plain = RecordingChooser(odd_tile()), RecordingChooser(), OptimizedBackend()
    with use_backend(OptimizedBackend(tile_chooser=one)) as backend:
        assert current_backend() is backend
        _ = Tensor(a) @ Tensor(b)
        OptimizedBackend(tile_chooser=other).dispatch("matmul", a, b)
        np.testing.assert_array_equal(plain.dispatch("matmul", a, b), native.matmul(a, b))
    assert len(one.keys) == len(other.keys) == 1


def test_a_patient_chooser_is_asked_when_a_shape_has_earned_it() -> None:
    class Patient(RecordingChooser):
        warm_up = 3 * 60 * 50 * 40

    chooser = Patient(odd_tile())
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    for number in range(1, 5):
        output = backend.dispatch("matmul", a, b)
        assert len(chooser.keys) == (number >= 3)
        np.testing.assert_array_equal(output, native.matmul(a, b, chooser.tile if number >= 3 else None))
    assert backend.explain("matmul", a[:50], b).tile == chooser.tile, "explain says what would come, and asks at once"


def test_products_below_the_choosers_least_work_are_left_alone() -> None:
    class Large(RecordingChooser):
        min_work = 60 * 50 * 40 + 1

    chooser = Large()
    backend = OptimizedBackend(tile_chooser=chooser)
    backend.dispatch("matmul", *operands(60, 50, 40))
    backend.dispatch("matmul", *operands(60, 50, 41))
    assert [key[1] for key in chooser.keys] == [(60, 50, 41)]


def test_ever_new_shapes_neither_grow_the_table_nor_push_out_what_was_decided() -> None:
    chooser = RecordingChooser()
    table = native.TileTable(chooser, 0, 2 * 400 * 13 * 13)
    regular = operands(400, 13, 13)
    for _ in range(2):
        table.matmul(*regular)
    assert len(chooser.keys) == 1
    a, b = operands(300, 260, 64)
    for m in range(100, 300):
        for n in range(60, 100):
            table.matmul(a[:m, :13], b[:13, :n])
    assert len(table) <= 2 * 4096
    key_count = len(chooser.keys)
    table.matmul(*regular)
    assert len(chooser.keys) == key_count, "the shape that was decided is still known"


def test_a_choice_that_is_kept_holds_from_the_first_call_for_its_thread_count() -> None:
    class Knowing(RecordingChooser):
        def preload(self, table: Any) -> None:
            table.keep_matmul((60, 50, 40), "nn", native.num_threads(), odd_tile())
            table.keep_matmul((61, 50, 40), "nn", native.num_threads() + 1, odd_tile())

    chooser = Knowing()
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b), native.matmul(a, b, odd_tile()))
    assert chooser.keys == []
    backend.dispatch("matmul", *operands(61, 50, 40))
    assert len(chooser.keys) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.keep_matmul((1, 2), "nn", 1, None),
        lambda table: table.keep_matmul((9, 9, 9), "xx", 1, None),
        lambda table: table.keep_matmul((9, 9, 9), "nn", 1, TileConfig(99, 16, 99, 16, 9)),
        lambda table: table.keep_conv2d((1, 2, 3), 1, None),
        lambda table: table.keep_matmul(),
        lambda _: native.TileTable(3),
    ],
)
def test_what_cannot_be_kept_gets_one_sentence(call: Any) -> None:
    with pytest.raises(ValueError, match=" "):
        call(native.TileTable(lambda *_: None))


def test_a_chooser_that_fails_is_heard_and_asked_again() -> None:
    def chooser(*_: Any) -> Any:
        answers.append(1)
        if len(answers) == 1:
            raise RuntimeError("not today")

    answers: list[int] = []
    backend, (a, b) = OptimizedBackend(tile_chooser=chooser), operands(60, 50, 40)
    with pytest.raises(RuntimeError, match="not today"):
        backend.dispatch("matmul", a, b)
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b), native.matmul(a, b))
    assert len(answers) == 2
    backend.tile_chooser = RecordingChooser("no tile")
    with pytest.raises(ConfigurationError, match="TileConfig"):
        backend.dispatch("matmul", a, b)


def test_a_chooser_may_use_the_backend_it_serves() -> None:
    backend, (a, b) = OptimizedBackend(), operands(60, 50, 40)

    def chooser(op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> Any:
        for m in range(20, 60):  # also pushes entries about while one is being decided
            backend.dispatch("matmul", a[:m], b, tile=None)
        return odd_tile() if shape[0] == 60 and backend.dispatch("matmul", a[:40], b) is not None else None

    backend.tile_chooser = chooser
    np.testing.assert_array_equal(backend.dispatch("matmul", a, b), native.matmul(a, b, odd_tile()))


def test_threads_that_meet_a_shape_together_all_get_its_tile() -> None:
    chooser = RecordingChooser(odd_tile())
    backend, wrong = OptimizedBackend(tile_chooser=chooser), list[str]()
    pairs = [operands(60 + i, 50, 40, seed=i) for i in range(20)]
    expected = [native.matmul(a, b, chooser.tile) for a, b in pairs]

    def work() -> None:
        for (a, b), right in [*zip(pairs, expected, strict=True)] * 5:
            if not np.array_equal(backend.dispatch("matmul", a, b), right):
                wrong.append("other result")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == [] and 20 <= len(chooser.keys) <= 80


def test_a_backend_whose_chooser_knows_it_is_collected() -> None:
    backend = OptimizedBackend()
    chooser = RecordingChooser()
    chooser.backend = backend  # type: ignore[attr-defined]
    backend.tile_chooser = chooser
    chooser_ref = weakref.ref(chooser)
    del backend, chooser
    gc.collect()
    assert chooser_ref() is None


def test_a_profile_runs_and_names_the_same_tile() -> None:
    chooser = RecordingChooser(odd_tile())
    a, b = operands(60, 50, 40)
    with use_backend(OptimizedBackend(tile_chooser=chooser)), ProfilerContext(memory=False) as profiler:
        output = (Tensor(a) @ Tensor(b)).data
    np.testing.assert_array_equal(output, native.matmul(a, b, chooser.tile))
    assert [event.tile for event in profiler.events if event.kind == "kernel"] == [chooser.tile]


def test_an_implementation_of_ones_own_with_tiles_asks_the_chooser_too() -> None:
    from tilewise.backend.registry import Implementation

    samples = []
    backend = OptimizedBackend(tile_chooser=RecordingChooser("mine"))
    backend.add(
        Implementation(
            "matmul",
            "mine",
            lambda a, b, tile=None: samples.append(tile),
            None,
            lambda a, b: ((1, 2, 3), "float32", "nn"),
        ),
        first=True,
    )
    backend.dispatch("matmul", *operands(4, 4, 4))
    assert samples == ["mine"]


def test_convolutions_are_asked_about_once_and_kept_choices_hold() -> None:
    from tilewise.backend.tiled.conv2d import ConvTile

    chooser, tile = RecordingChooser(), ConvTile("direct", mr=2)
    x, w = np.ones((2, 8, 9, 9), np.float32), np.ones((16, 8, 3, 3), np.float32)
    backend = OptimizedBackend(tile_chooser=chooser)
    for padding in ((1, 1), (0, 0), (1, 1)):
        backend.dispatch("conv2d", x, w, padding=padding)
    assert [key[1][9:11] for key in chooser.keys] == [(1, 1), (0, 0)]
    assert backend.dispatch("conv2d", x[:0], w).shape == (0, 16, 7, 7) and len(chooser.keys) == 2
    table = native.TileTable(chooser)
    table.keep_conv2d((2, 8, 9, 9, 16, 3, 3, 1, 1, 1, 1, 1), native.num_threads(), tile)
    expected = native.conv2d(x, w, padding=(1, 1), tile=tile)
    np.testing.assert_array_equal(table.conv2d(x, w, padding=(1, 1)), expected)
    assert len(chooser.keys) == 2
