"""Benchmarks, speed-ups and scores: made of figures that were measured, and refused where something is wrong."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import models, save
from tilewise._extension import native
from tilewise.backend import OptimizedBackend
from tilewise.bench import (
    CompetitionSubmission,
    Rejected,
    Settings,
    TinyMLPerf,
    TooNoisy,
    benchmark_model,
    compute_speedup,
    integrity,
    measure,
    parse_recipe,
    scoring,
)
from tilewise.bench.build import build, build_stages
from tilewise.bench.measure import Benchmark
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import check_consistent, score_recipe, validate_recipe
from tilewise.bench.validation import validate
from tilewise.errors import ConfigurationError
from tilewise.profile import Interval, ProfilerContext, Timer
from tilewise.profile.machine import Bandwidth, MachineFigures, Peak

needs_kernels = pytest.mark.skipif(native is None, reason="the heap watch and kernels are not built")
MLP, CNN, GPT = TinyMLPerf.MLP_SPRINT, TinyMLPerf.CNN_MARATHON, TinyMLPerf.TRANSFORMER_DECATHLON
SHORT_GPT = replace(GPT, new_tokens=12)


def test_events_have_the_names_of_the_competition() -> None:
    assert [e.name for e in TinyMLPerf.events()] == [
        "MLP_SPRINT",
        "CNN_MARATHON",
        "TRANSFORMER_DECATHLON",
        "TILE_OLYMPIAD",
    ]
    with pytest.raises(ConfigurationError, match="known are MLP_SPRINT"):
        TinyMLPerf.event("RELAY")
    with pytest.raises(ConfigurationError, match="did you mean 'MLP_SPRINT'"):
        TinyMLPerf.event("MLP_SPRIN")
    assert TinyMLPerf.event("mlp sprint").name == "MLP_SPRINT"


def test_drawn_inputs_are_new_each_time_and_look_like_the_public_ones() -> None:
    for event in (MLP, CNN, GPT):
        one, other = (event.draw(np.random.default_rng(), 4) for _ in range(2))
        assert one.shape[1:] == event.public_inputs().shape[1:]
        assert one.dtype == event.public_inputs().dtype
        assert (one != other).any()


def test_benchmark_has_every_figure_of_a_plain_model(quick: Settings) -> None:
    peaks = [Peak(isa, 1, 1e11) for isa in (native.supported_isas() if native is not None else ["numpy"])]
    ceilings = MachineFigures("made up", 1, "not measured", peaks, [Bandwidth(1 << 28, 1, 1e10, 1e10)], [], 1e9)
    profiler = ProfilerContext(machine=ceilings)
    benchmark = benchmark_model(models.pretrained("mlp"), profiler, settings=quick)
    assert benchmark.event == "MLP_SPRINT"
    assert benchmark.accuracy == pytest.approx(0.983, abs=0.001)
    assert benchmark.latency.p50 > 0
    assert benchmark.throughput == pytest.approx(32 / benchmark.latency.p50)
    assert benchmark.dtypes == ("float32",)
    assert benchmark.file_bytes > 50_000 * 4
    assert benchmark.memory_bytes > 50_000 * 4
    assert benchmark.training_step_s is not None and benchmark.training_step_s > 0
    assert profiler.get_results().flops > 0


def test_a_model_of_no_event_needs_one_named() -> None:
    with pytest.raises(ConfigurationError, match="none of the events"):
        benchmark_model(models.vgg6(), Timer())


def test_speedup_of_two_models_has_intervals_and_true_sizes(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    gains = compute_speedup(baseline(MLP), build(parse_recipe(mlp_recipe)), settings=quick)
    assert gains.latency.low <= gains.latency.ratio <= gains.latency.high
    assert 3 < gains.size.ratio < 4.1
    assert gains.size.low == gains.size.high
    assert gains.points_lost is not None and abs(gains.points_lost) <= 1


def test_benchmarks_of_different_events_do_not_compare(quick: Settings) -> None:
    mlp, cnn = (
        benchmark_model(models.pretrained(name), Timer(sample_seconds=1e-4), settings=quick, training=False)
        for name in ("mlp", "cnn")
    )
    with pytest.raises(ConfigurationError, match="does not compare"):
        compute_speedup(mlp, cnn)
    assert compute_speedup(mlp, mlp).latency.ratio == 1


def test_the_score_is_the_geometric_mean_of_three_gains_and_has_a_step_for_each(
    mlp_recipe: dict[str, Any], quick: Settings
) -> None:
    score = score_recipe(parse_recipe(mlp_recipe), quick)
    assert score.score == pytest.approx((score.speedup * score.memory_gain * score.size_gain) ** (1 / 3))
    assert [step["label"].split()[0] for step in score.steps] == ["plain", "backend", "quantize"]
    assert score.steps[0]["speedup"] == 1
    assert score.steps[-1]["speedup"] == score.speedup
    assert score.figures["entry"]["dtypes"] == ("float32", "int8")
    check_consistent(score.as_dict())


def test_invented_numbers_do_not_pass_as_a_result(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    facts = score_recipe(parse_recipe(mlp_recipe), quick).as_dict()
    for invented in ({"score": 99.0}, {"size_gain": 50.0}, {"figures": {}}, {"score": math.nan}):
        with pytest.raises(Rejected) as raised:
            check_consistent(facts | invented)
        assert raised.value.code == "invented numbers"
    factor = 8.0
    faster = facts | {"speedup": facts["speedup"] * factor, "score": facts["score"] * factor ** (1 / 3)}
    with pytest.raises(Rejected, match="does not follow from latencies"):
        check_consistent(faster)


def test_a_measurement_that_scatters_is_said_instead_of_scored(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    with pytest.raises(TooNoisy, match="not scored"):
        score_recipe(parse_recipe(mlp_recipe), replace(quick, widest_interval=1e-12))


def test_a_process_of_its_own_gives_the_same_kind_of_answer(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    entry = CompetitionSubmission(MLP, mlp_recipe, "owls", settings=quick)
    assert entry.validate().accuracy > 0.97
    assert entry.compute_score().event == "MLP_SPRINT"
    bad = mlp_recipe | {"steps": [{"step": "prune", "sparsity": 0.95}]}
    with pytest.raises(Rejected) as raised:
        CompetitionSubmission(MLP, bad, "owls", settings=quick).validate()
    assert raised.value.code == "below the floor"


def test_a_recipe_of_another_event_is_refused(mlp_recipe: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="this recipe is for MLP_SPRINT"):
        CompetitionSubmission(CNN, mlp_recipe, "owls")


# --- text ---


def test_a_cache_gives_every_token_of_the_plain_model() -> None:
    entry = replace(baseline(SHORT_GPT), backend=OptimizedBackend(), use_cache=True)
    validation = validate(entry, baseline(SHORT_GPT), Settings(drawn_inputs=128, seed=2))
    assert validation.accuracy == 1.0
    assert validation.left_out <= 2


def test_one_wrong_token_is_enough_to_be_rejected() -> None:
    class Wrong(Runner):
        def call(self, inputs: Any) -> Any:
            tokens = super().call(inputs)
            tokens[-1] = (tokens[-1] + 7) % 96
            return tokens

    plain = baseline(SHORT_GPT)
    entry = Wrong(SHORT_GPT, plain.model, OptimizedBackend(), use_cache=True)
    with pytest.raises(Rejected, match="token 12 after prompt 1"):
        validate(entry, plain, Settings(drawn_inputs=128, seed=2))


# --- cheating ---


def _weights(tmp_path: Path, name: str, change: Any, **step: Any) -> dict[str, Any]:
    state = {key: np.array(t) for key, t in models.pretrained(name).state_dict().items()}
    save({key: change(key, array) for key, array in state.items()}, tmp_path / "w.safetensors")
    event = "MLP_SPRINT" if name == "mlp" else "CNN_MARATHON"
    return {"tilewise": 1, "event": event, "steps": [{"step": "weights", "file": "w.safetensors", **step}]}


def test_the_shipped_weights_are_accepted_as_a_file(tmp_path: Path, quick: Settings) -> None:
    recipe = _weights(tmp_path, "mlp", lambda _, a: a)
    assert validate_recipe(parse_recipe(recipe, tmp_path), quick).accuracy > 0.98


def test_weights_of_another_model_are_rejected(tmp_path: Path, quick: Settings) -> None:
    other = models.mlp(seed=7).state_dict()
    recipes = [
        _weights(tmp_path, "mlp", lambda key, _: np.array(other[key])),
        _weights(tmp_path, "cnn", lambda _, a: a) | {"event": "MLP_SPRINT"},
    ]
    save(other, tmp_path / "w.safetensors")
    with pytest.raises(Rejected, match="cosine") as raised:
        validate_recipe(parse_recipe(recipes[0], tmp_path), quick)
    assert raised.value.code == "another model"
    _weights(tmp_path, "cnn", lambda _, a: a)
    with pytest.raises(Rejected, match="names or shapes differ"):
        validate_recipe(parse_recipe(recipes[1], tmp_path), quick)


def test_floats_declared_as_int8_are_rejected(tmp_path: Path, quick: Settings) -> None:
    rounded = _weights(tmp_path, "mlp", lambda _, a: np.rint(a * 64).astype(np.float32), dtype="int8")
    with pytest.raises(Rejected, match="declared int8 but stored as float32") as raised:
        validate_recipe(parse_recipe(rounded, tmp_path), quick)
    assert raised.value.code == "false dtype"


def test_a_layer_that_calls_floats_int8_is_rejected(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    entry = build(parse_recipe(mlp_recipe))
    model: Any = entry.model

    class Pretender:
        """Has the bytes' interface, and floats inside."""

        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel
            self.nbytes = kernel.nbytes

        def weights(self) -> Any:
            return self._kernel.weights().astype(np.float32)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._kernel, name)

    layer = next(layer for layer in model.integer if hasattr(layer, "kernel"))
    layer.kernel = Pretender(layer.kernel)
    with pytest.raises(Rejected) as raised:
        validate(entry, baseline(MLP), quick)
    assert raised.value.code == "false dtype"


def test_a_fast_model_that_answers_wrongly_is_rejected(quick: Settings) -> None:
    class Constant(Runner):
        def call(self, inputs: Any) -> Any:
            return np.eye(10, dtype=np.float32)[np.zeros(len(inputs), int)]

    entry = Constant(MLP, models.pretrained("mlp"), OptimizedBackend())
    with pytest.raises(Rejected) as raised:
        validate(entry, baseline(MLP), quick)
    assert raised.value.code == "below the floor"


def test_answers_memorised_for_the_public_inputs_are_rejected(quick: Settings) -> None:
    labels = {x.tobytes(): y for x, y in zip(MLP.public_inputs(), MLP.public_labels(), strict=True)}

    class Memorised(Runner):
        def call(self, inputs: Any) -> Any:
            return np.eye(10, dtype=np.float32)[[labels.get(x.tobytes(), 0) for x in inputs]]

    entry = Memorised(MLP, models.pretrained("mlp"), OptimizedBackend())
    with pytest.raises(Rejected, match="transformed and with new noise"):
        validate(entry, baseline(MLP), quick)


def test_nan_is_not_an_answer(quick: Settings) -> None:
    class Nan(Runner):
        def call(self, inputs: Any) -> Any:
            return np.full((len(inputs), 10), np.nan, np.float32)

    with pytest.raises(Rejected, match="finite logits"):
        validate(Nan(MLP, models.pretrained("mlp"), OptimizedBackend()), baseline(MLP), quick)


def test_a_score_taken_while_the_clock_frequency_changed_is_taken_again(
    mlp_recipe: dict[str, Any], quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reason_lists = measure.Timer.compare, [["frequency: a fixed loop ran 87% slower at the end"], []]

    def compare(*args: Any, **options: Any) -> Any:
        return replace(real(*args, **options), reasons=reason_lists.pop(0))

    monkeypatch.setattr(measure.Timer, "compare", compare)
    score = score_recipe(parse_recipe(mlp_recipe), quick)
    assert not reason_lists
    assert not any("frequency" in note for note in score.notes)


def test_another_model_while_the_clock_runs_is_rejected(
    mlp_recipe: dict[str, Any], quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoFaced(Runner):
        timing = False

        def call(self, inputs: Any) -> Any:
            return np.zeros((len(inputs), 10), np.float32) if self.timing else super().call(inputs)

    good = build_stages(parse_recipe(mlp_recipe))
    last = good[-1].runner
    entry = TwoFaced(MLP, last.model, last.backend)
    monkeypatch.setattr(scoring, "build_stages", lambda _: [good[0], replace(good[-1], runner=entry)])
    real = measure.measure_together

    def fake_timing(*args: Any) -> Any:
        entry.timing = True
        comparison = real(*args)
        entry.timing = False
        return comparison

    monkeypatch.setattr(scoring, "measure_together", fake_timing)
    with pytest.raises(Rejected) as raised:
        score_recipe(parse_recipe(mlp_recipe), quick)
    assert raised.value.code == "another model timed"


def test_weights_changed_after_the_accuracy_test_are_rejected(
    mlp_recipe: dict[str, Any], quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = build_stages(parse_recipe(mlp_recipe | {"steps": [{"step": "backend", "name": "native"}]}))
    monkeypatch.setattr(scoring, "build_stages", lambda _: stages)
    real = measure.measure_together

    def meddling(runners: Any, *args: Any) -> Any:
        stages[-1].runner.model[4].weight.data[0, 0] += 1  # type: ignore[index]
        return real(runners, *args)

    monkeypatch.setattr(scoring, "measure_together", meddling)
    with pytest.raises(Rejected, match="changed between the accuracy test and the timing"):
        score_recipe(parse_recipe(mlp_recipe), quick)


def test_a_changed_clock_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = integrity.ClockWatch()
    watch.check()
    real = time.perf_counter_ns
    start = real()
    monkeypatch.setattr("tilewise.profile.timing.clock.perf_counter_ns", lambda: start + (real() - start) // 4)
    with pytest.raises(Rejected) as raised:
        watch.check()
    assert raised.value.code == "changed clock"
    monkeypatch.undo()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    with pytest.raises(Rejected, match=r"time\.perf_counter is not the system's clock"):
        watch.check()


def test_a_comparison_that_the_time_limit_ends_is_noise(quick: Settings) -> None:
    plain = baseline(MLP)
    with pytest.raises(TooNoisy, match="not scored: only"):
        measure.measure_together({"baseline": plain, "entry": plain}, replace(quick, time_limit=1e-6))


def test_figures_of_a_very_restless_minute_are_wide_and_not_an_error() -> None:
    """A sample may take thousands of times as long as the others where other programs want every core."""
    calm = Timer(sample_seconds=1e-5).measure(lambda: None, runs=20)
    wild = replace(calm, intervals={**calm.intervals, "p50": Interval(0.0, 1e4 * calm.p50)})
    figures = [Benchmark("MLP_SPRINT", latency, 1.0, 1, 1, ()) for latency in (wild, calm)]
    gain = compute_speedup(*figures).latency
    assert gain.low < gain.ratio < gain.high < math.inf


def test_a_baseline_that_was_slowed_down_is_noticed(mlp_recipe: dict[str, Any], quick: Settings) -> None:
    plain = baseline(MLP)
    plain.backend.register("matmul", "numpy", lambda a, b, **_: a @ b)
    with pytest.raises(Rejected, match="not tilewise's own") as raised:
        integrity.check_numpy_backend(plain.backend)
    assert raised.value.code == "slowed baseline"

    class Slowed(Runner):
        def call(self, inputs: Any) -> Any:
            for _ in range(50):  # work rather than a sleep: a busy machine slows both sides of the ratio alike
                super().call(inputs)
            return super().call(inputs)

    slowed = Slowed(MLP, plain.model, baseline(MLP).backend)
    with pytest.raises(Rejected, match="something slows it down"):
        integrity.check_baseline_speed(MLP, slowed, MLP.public_inputs()[:32])
    with pytest.raises(TooNoisy, match="other processes load this machine"):
        integrity.check_baseline_speed(MLP, slowed, MLP.public_inputs()[:32], under_load=True)
    assert integrity.check_baseline_speed(MLP, baseline(MLP), MLP.public_inputs()[:32]) > 0


def test_a_tile_is_used_where_the_recipe_names_it() -> None:
    if native is None:
        pytest.skip("tiles belong to the compiled kernels")
    from tilewise.backend import tile_space

    tile = tile_space("matmul", (32, 256, 64), layout="nt", threads=1)[0]
    sizes: dict[str, Any] = tile.as_dict() | {"pack_a": tile.pack_a, "pack_b": tile.pack_b}
    entry = {"shape": [32, 256, 64], "layout": "nt", "tile": sizes}
    steps = [{"step": "backend", "name": "native"}, {"step": "tile", "matmul": [entry]}]
    runner = build(parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}))
    assert runner.backend.tile_chooser is not None
    assert runner.backend.tile_chooser("matmul", (32, 256, 64), "float32", "nt") == tile
    bad = {"step": "tile", "matmul": [entry | {"tile": sizes | {"mr": 1000}}]}
    with pytest.raises(Rejected, match="cannot be used"):
        build(parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [steps[0], bad]}))


def test_predictions_are_scored_by_tile_score(tmp_path: Path) -> None:
    from tilewise.costmodel import load_dataset
    from tilewise.costmodel.course.predictions import write_predictions

    kernels = list(load_dataset("h200").valid)
    write_predictions(tmp_path / "best.csv", {k.name: np.argsort(k.target)[:5] for k in kernels})
    recipe = {"tilewise": 1, "event": "TILE_OLYMPIAD", "predictions": "best.csv"}
    score = score_recipe(parse_recipe(recipe, tmp_path))
    assert score.score == pytest.approx(1.0)
    with pytest.raises(Rejected, match="only the teacher has"):
        check_consistent(score.as_dict())
    facts = score.as_dict()
    check_consistent(facts | {"figures": facts["figures"] | {"split": "the class's truth"}})
    (tmp_path / "best.csv").write_text("ID,TopConfigs\ntile:xla:nothing,0;1\n")
    with pytest.raises(Rejected, match="no row for"):
        score_recipe(parse_recipe(recipe, tmp_path))
