"""Promises of ProfilerContext: what it records, that contexts keep out of each other's way, and what it exports."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import tilewise
from tests.waiting import PATIENCE
from tilewise import Tensor, _events, models, nn, no_grad
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.backend.conv import default_conv2d_tile
from tilewise.backend.gemm import default_matmul_tile
from tilewise.errors import ConfigurationError, ShapeError, TilewiseError
from tilewise.profile import FLOPCounter, ProfilerContext

X = np.random.default_rng(0).random((4, 64), dtype=np.float32)


def profiled(ceilings, func):
    with ProfilerContext(machine=ceilings) as profiler:
        func()
    return profiler


def names(profiler):
    return [event.name for event in profiler.events if event.kind == "op"]


# --- what is recorded ---


def test_operations_are_recorded_with_layer_shape_work_backend_and_thread(ceilings):
    model = models.mlp()
    results = profiled(ceilings, lambda: model(Tensor(X))).get_results()
    unit = next(u for u in results.units if u.name == "matmul")
    assert unit.layer == "0"
    assert unit.shapes[:2] == ((4, 64), (64, 256))
    assert unit.flops == 2 * 4 * 64 * 256
    assert unit.bytes_moved >= (4 * 64 + 64 * 256 + 4 * 256) * 4
    assert unit.backend in ("native", "numpy")
    assert unit.thread == threading.get_ident()
    assert unit.seconds > 0


def test_backward_belongs_to_the_layer_of_its_forward(ceilings):
    model = models.mlp()
    results = profiled(ceilings, lambda: model(Tensor(X)).sum().backward()).get_results()
    assert {u.layer for u in results.units if u.name == "matmul" and u.phase == "backward"} == {"0", "2", "4"}


def test_flops_are_those_of_the_counter(ceilings):
    model = models.resnet8()
    x = np.zeros((1, 3, 32, 32), np.float32)
    results = profiled(ceilings, lambda: model(Tensor(x)).sum().backward()).get_results()
    counts = FLOPCounter().count_ops(model, x, backward=True)
    assert results.flops == counts.total
    assert {name: row.flops for name, row in results.by_layer.items() if row.flops} == counts.by_layer


def test_the_backend_in_force_is_named(ceilings):
    def on_numpy():
        with use_backend("numpy"):
            models.mlp()(Tensor(X))

    results = profiled(ceilings, on_numpy).get_results()
    assert set(results.by_op["matmul"].backends) == {"numpy"}


def test_every_second_is_accounted_for_once(ceilings):
    model = models.gpt()
    results = profiled(ceilings, lambda: model(np.zeros((1, 16), int)).sum().backward()).get_results()
    total = sum(row.seconds for row in results.by_layer.values()) + results.outside_seconds
    assert total == pytest.approx(results.seconds, rel=0.02)


def test_nothing_is_recorded_outside_and_no_array_is_kept_alive(ceilings):
    import gc
    import weakref

    model = models.mlp()
    before = Tensor(X)
    model(before)
    arrays = [np.ones((4, 64), np.float32)]
    array_ref = weakref.ref(arrays[0])
    profiler = profiled(ceilings, lambda: model(Tensor(arrays[0])))
    count = len(profiler.events)
    model(before)
    arrays.clear()
    gc.collect()
    assert len(profiler.events) == count > 0
    assert array_ref() is None
    assert _events.recorders == []


def test_an_operation_that_raises_is_said_and_the_context_closes(ceilings):
    profiler = ProfilerContext(machine=ceilings)
    with pytest.raises(ShapeError), profiler:
        _ = Tensor(X) @ Tensor(X)
    assert _events.recorders == []
    assert profiler.get_results().failed == 1
    assert "raised an error" in profiler.report()


def test_a_layer_that_is_nobodys_child_still_has_a_name(ceilings):
    class Outer(nn.Module):
        def forward(self, x):
            return nn.Linear(64, 3)(x)

    results = profiled(ceilings, lambda: Outer()(Tensor(X))).get_results()
    assert "Linear" in results.by_layer


def test_a_layer_put_in_between_two_calls_is_named_by_its_place(ceilings):
    model = models.mlp()
    with ProfilerContext(machine=ceilings) as profiler:
        model(Tensor(X))
        model.extra = nn.Sequential(nn.Linear(10, 10))
        model(Tensor(X))
    layers = {event.layer for event in profiler.events if event.kind == "module"}
    assert {"0", "4", "extra", "extra.0"} <= layers


def test_events_nest_as_they_ran(ceilings):
    model = models.gpt()
    profiler = profiled(ceilings, lambda: model(np.zeros((1, 8), int)).sum().backward())
    for event in profiler.events:
        if event.parent is not None:
            assert event.parent.start_ns <= event.start_ns <= event.end_ns <= event.parent.end_ns
            assert event.thread == event.parent.thread
            assert event.layer.startswith(event.parent.layer)
        assert event.inner_ns <= event.duration_ns
    kernels = [event for event in profiler.events if event.kind == "kernel"]
    assert kernels and all(event.parent is not None and event.parent.kind == "op" for event in kernels)
    assert {event.phase for event in kernels} == {"forward", "backward"}


@pytest.mark.skipif(native is None, reason="tiles and pooled results belong to the compiled kernels")
def test_the_tile_is_the_one_that_was_used(ceilings):
    a, b = Tensor(np.ones((300, 200), np.float32)), Tensor(np.ones((130, 200), np.float32))
    tile = replace(default_matmul_tile(a.data, b.data.T), kc=64)

    def products():
        _ = a @ b.T
        with use_backend(OptimizedBackend(tile_chooser=lambda *_: tile)):
            _ = a @ b.T

    default, tile_used = (u.tile for u in profiled(ceilings, products).get_results().units if u.name == "matmul")
    assert default == str(default_matmul_tile(a.data, b.data.T))
    assert tile_used == str(tile)


@pytest.mark.skipif(native is None, reason="tiles and pooled results belong to the compiled kernels")
def test_the_tile_of_a_convolution_is_that_of_its_stride_and_padding(ceilings):
    x = Tensor(np.ones((2, 16, 20, 20), np.float32))
    for options in ({"padding": 1}, {"stride": 2}, {"padding": 2, "groups": 4}):
        layer = nn.Conv2d(16, 16, 3, **options)
        (unit,) = profiled(ceilings, lambda layer=layer: layer(x)).get_results().units
        geometry = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
        assert unit.tile == str(default_conv2d_tile(x.data, layer.weight.data, **geometry))


def test_an_addition_moves_nothing_in_its_backward_pass(ceilings):
    a, b = (Tensor(np.ones((64, 64), np.float32), requires_grad=True) for _ in range(2))
    total = a + b
    results = profiled(ceilings, lambda: total.backward(np.ones((64, 64), np.float32))).get_results()
    assert results.by_op["add_grad"].bytes_moved == 0


@pytest.mark.skipif(native is None, reason="tiles and pooled results belong to the compiled kernels")
def test_results_come_from_the_same_place_with_and_without_a_profile_and_are_counted(ceilings):
    layer, x = nn.Linear(512, 1024), Tensor(np.ones((256, 512), np.float32))

    def addresses():
        paths = set()
        for _ in range(6):
            paths.add(layer(x).data.ctypes.data)
        return paths

    with no_grad():
        plain = addresses()
        with ProfilerContext(machine=ceilings) as profiler:
            recorded = addresses()
    assert recorded <= plain
    assert all(u.allocated >= 4 * 256 * 1024 for u in profiler.get_results().units if u.name == "matmul")


# --- contexts among themselves ---


def test_an_outer_context_also_sees_the_inner_ones_work(ceilings):
    x = Tensor(X)
    with ProfilerContext(machine=ceilings) as outer:
        _ = x + x
        with ProfilerContext(machine=ceilings) as inner:
            _ = x * x
        _ = x - x
    assert names(outer) == ["Add", "Mul", "Sub"]
    assert names(inner) == ["Mul"]


def test_threads_that_profile_see_only_their_own_work(ceilings):
    x = Tensor(X)
    barrier = threading.Barrier(2, timeout=PATIENCE)
    times = {}

    def work(name, operation):
        with ProfilerContext(machine=ceilings) as profiler:
            for _ in range(20):
                barrier.wait()
                operation()
        times[name] = names(profiler)

    threads = [
        threading.Thread(target=work, args=("add", lambda: x + x)),
        threading.Thread(target=work, args=("mul", lambda: x * x)),
    ]
    [t.start() for t in threads]
    [t.join(PATIENCE) for t in threads]
    assert times == {"add": ["Add"] * 20, "mul": ["Mul"] * 20}
    assert _events.recorders == []


def test_a_context_sees_the_threads_it_starts(ceilings):
    x = Tensor(X)
    with ProfilerContext(machine=ceilings) as profiler:
        thread = threading.Thread(target=lambda: x + x)
        thread.start()
        thread.join()
        _ = x * x
    assert sorted(names(profiler)) == ["Add", "Mul"]
    assert len({event.thread for event in profiler.events}) == 2


def test_a_context_entered_again_adds_to_what_it_has(ceilings):
    x = Tensor(X)
    profiler = ProfilerContext(machine=ceilings)
    for _ in range(2):
        with profiler:
            _ = x + x
    assert names(profiler) == ["Add", "Add"]
    with profiler, pytest.raises(ConfigurationError, match="already open"), profiler:
        pass


def test_results_of_an_open_context_are_refused(ceilings):
    with ProfilerContext(machine=ceilings) as profiler, pytest.raises(ConfigurationError, match="still open"):
        profiler.get_results()


def test_an_empty_profile_has_a_report(ceilings):
    profiler = profiled(ceilings, lambda: None)
    assert "Nothing was recorded" in profiler.report()
    assert profiler.get_results().bottleneck is None


# --- reports and files ---


@pytest.fixture
def profile(ceilings):
    model = models.gpt()
    return profiled(ceilings, lambda: model(np.zeros((2, 8), int)).sum().backward())


def test_the_report_shows_both_tables_the_ceilings_and_one_bottleneck(profile):
    text = profile.report()
    assert re.search(r"^layer +time +share", text, re.MULTILINE)
    assert re.search(r"^operation +time +share", text, re.MULTILINE)
    assert "100 GFLOP/s" in text
    assert len(re.findall(r"^Bottleneck: ", text, re.MULTILINE)) == 1


def test_the_results_are_plain_data(profile, tmp_path):
    data = json.loads(profile.export_json(tmp_path / "p.json").read_text())
    assert data["flops"] == profile.get_results().flops
    assert data["bottleneck"]["sentence"] in profile.report()
    assert data["by_op"]["matmul"]["roofline_share"] > 0


def test_the_trace_follows_the_trace_event_format(profile, tmp_path):
    """What Perfetto's importer asks of JSON: complete events with numeric times that nest within their thread."""
    data = json.loads(profile.export_trace(tmp_path / "t.json").read_text())
    assert data["displayTimeUnit"] == "ms"
    events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(profile.events)
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
    assert {e["name"] for e in data["traceEvents"] if e["ph"] == "M"} == {"process_name", "thread_name"}
    for thread in {e["tid"] for e in events}:
        open_until = []
        for event in sorted((e for e in events if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])


def test_the_page_is_whole_and_loads_nothing(profile, tmp_path):
    page = profile.export_html(tmp_path / "p.html", title="a <b> & c").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 2 and "prefers-color-scheme: dark" in page
    assert "a &lt;b&gt; &amp; c" in page and "<b> & c" not in page
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttp""", page)


def test_the_page_survives_odd_profiles(ceilings, tmp_path):
    profiled(ceilings, lambda: None).export_html(tmp_path / "empty.html")
    profiled(ceilings, lambda: Tensor(X).reshape(64, 4)).export_html(tmp_path / "views.html")
    profiled(ceilings, lambda: [Tensor(X) + 1 for _ in range(4000)]).export_html(tmp_path / "many.html")
    assert (tmp_path / "many.html").stat().st_size < 2_000_000


def test_a_file_that_cannot_be_written_is_said(profile, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TilewiseError):
        profile.export_html(tmp_path / "file" / "p.html")


def test_recording_changes_no_result():
    model, x = models.cnn().eval(), Tensor(np.random.default_rng(1).random((2, 1, 8, 8), dtype=np.float32))
    with no_grad():
        plain = np.asarray(model(x)).copy()
        with ProfilerContext():
            recorded = np.asarray(model(x)).copy()
    np.testing.assert_array_equal(plain, recorded)


def test_switched_off_nothing_listens():
    assert tilewise._events.recorders == []


def test_layers_have_the_name_that_the_model_prints():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with ProfilerContext() as profiler:
        model(Tensor(np.ones((3, 4), np.float32)))
    rows = profiler.get_results().by_layer
    assert rows["0"].title == "0 Linear(4→8)" and rows["2"].label in profiler.report() and rows["2"].label in str(model)


def test_layers_of_a_model_that_is_gone_still_have_their_class():
    def run() -> None:
        nn.Sequential(nn.Linear(4, 8), nn.ReLU())(Tensor(np.ones((3, 4), np.float32)))

    with ProfilerContext() as profiler:
        run()
    assert profiler.get_results().by_layer["0"].title == "0 Linear"
