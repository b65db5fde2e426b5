"""Interleaved timing of choices and the check against ATen, on a fake GPU whose clock the test controls."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.gpu.inductor.rebenchmark import _block_lists, is_close, patch_autotuner, rebenchmark, time_tilings
from tilewise.gpu.inductor.templates import has_fusible_epilogue

torch = pytest.importorskip("torch")


class _Clock:
    now = 0.0


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


class _Graph:
    current: _Graph | None = None

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        _Graph.current = self

    def capture_end(self) -> None:
        _Graph.current = None

    def replay(self) -> None:
        for run in self.runs:
            run()


class _Stream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Cuda:
    Stream, Event, CUDAGraph = _Stream, _Event, _Graph

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False

    @staticmethod
    def stream(_: Any) -> Any:
        return contextlib.nullcontext()


class _Torch:
    """PyTorch on the CPU with a fake `cuda` module."""

    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Meta:
    device, offset = "cpu", 0

    def __init__(self, *sizes: int, strides: tuple[int, ...] | None = None, dtype: Any = torch.bfloat16) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.strides = strides or tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))


class _Request:
    """A product that takes `ms` on the fake clock, and whose result is multiplied by `factor`."""

    has_out_variant = True

    def __init__(self, ms: float, factor: float = 1.0, is_aten: bool = False) -> None:
        self.input_tensor_meta = [_Meta(24, 40, strides=(0, 1)), _Meta(24, 16), _Meta(16, 40, strides=(1, 16))]
        self.output_tensor_meta = _Meta(24, 40)
        self.ms, self.factor = ms, factor
        if is_aten:
            self.callable_path = "extern_kernels.addmm"

    def make_run_fn(self, bias: Any, a: Any, b: Any, *, out: Any) -> Any:
        def run() -> None:
            if _Graph.current is not None:
                _Graph.current.runs.append(run)
                return
            _Clock.now += self.ms
            torch.addmm(bias, a, b, out=out)
            out.mul_(self.factor)

        return run


class _Choice:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.bmreq = _Request(*args, **kwargs)


def test_choices_are_timed_as_graphs() -> None:
    aten, slow, fast = _Choice(0.02, is_aten=True), _Choice(0.05), _Choice(0.01)
    times = rebenchmark(_Torch(), {aten: 0.04, slow: 0.03, fast: 0.05})
    assert [round(times[choice], 6) for choice in (aten, slow, fast)] == [0.02, 0.05, 0.01]


def test_a_template_within_the_noise_does_not_replace_aten() -> None:
    aten, close = _Choice(0.02, is_aten=True), _Choice(0.0199)
    times = rebenchmark(_Torch(), {aten: 0.04, close: 0.03})
    assert min(times, key=times.__getitem__) is aten


@pytest.mark.parametrize(("aten_ms", "wins"), [(0.005, False), (0.05, True)])
def test_on_short_calls_a_template_must_save_a_tenth_of_a_microsecond(aten_ms: float, wins: bool) -> None:
    aten, template = _Choice(aten_ms, is_aten=True), _Choice(aten_ms * 0.97)
    times = rebenchmark(_Torch(), {aten: 0.04, template: 0.03})
    assert (min(times, key=times.__getitem__) is template) == wins


def test_a_choice_with_a_wrong_result_is_rejected() -> None:
    aten, wrong = _Choice(0.02, is_aten=True), _Choice(0.001, factor=1.2)
    times = rebenchmark(_Torch(), {aten: 0.04, wrong: 0.001})
    assert times[wrong] == math.inf and round(times[aten], 6) == 0.02


def test_without_aten_the_first_choice_is_the_default() -> None:
    default, close, faster = _Choice(0.02), _Choice(0.0199), _Choice(0.015)
    times = rebenchmark(_Torch(), {default: 0.04, close: 0.03})
    assert min(times, key=times.__getitem__) is default
    times = rebenchmark(_Torch(), {default: 0.04, faster: 0.05})
    assert min(times, key=times.__getitem__) is faster


def test_without_aten_results_are_compared_with_the_first_choice() -> None:
    default, wrong, right = _Choice(0.02), _Choice(0.001, factor=1.2), _Choice(0.01)
    times = rebenchmark(_Torch(), {default: 0.04, wrong: 0.001, right: 0.03})
    assert times[wrong] == math.inf and min(times, key=times.__getitem__) is right
    not_a_number = _Choice(0.02, factor=math.nan)
    assert math.isfinite(rebenchmark(_Torch(), {not_a_number: 0.04, right: 0.03})[right])


def test_choices_that_failed_in_the_compiler_are_not_run() -> None:
    aten, broken, other = _Choice(0.02, is_aten=True), _Choice(0.01), _Choice(0.03)
    assert set(rebenchmark(_Torch(), {aten: 0.04, broken: math.inf, other: 0.03})) == {aten, other}
    assert rebenchmark(_Torch(), {aten: 0.04, broken: math.inf}) == {}


def test_choices_of_an_unknown_kind_are_not_timed() -> None:
    assert rebenchmark(_Torch(), {_Choice(0.02, is_aten=True): 0.04, object(): 0.01}) == {}


def test_block_lists_contain_existing_blocks() -> None:
    integer, tensors = torch.int32, [_Meta(2, 4, 256, 64)] * 3
    masked = [*tensors, *[_Meta(1, 1, 2, dtype=integer), _Meta(1, 1, 2, 6, dtype=integer)] * 2]
    partial_counts, partial, full_counts, full = _block_lists(torch, masked).values()
    assert partial_counts.tolist() == [1, 1] and full_counts.tolist() == [3, 3]
    assert partial.tolist() == full.tolist() == [0, 1, 2, 3, 4, 5] * 2
    unmasked = _block_lists(torch, [*tensors, _Meta(1, 1, 1, dtype=integer), _Meta(1, 1, 1, 1, dtype=integer)])
    assert [values.tolist() for values in unmasked.values()] == [[1], [0]]
    assert _block_lists(torch, tensors) == {}
    with pytest.raises(ValueError, match="not lists of blocks"):
        _block_lists(torch, [*masked, _Meta(9, dtype=integer)])


def test_rounding_is_accepted_and_one_wrong_element_is_not() -> None:
    right = torch.randn(64, 64)
    wrong = right.clone()
    wrong[63, 63] += 1.0
    assert is_close(torch, right.bfloat16(), right) and not is_close(torch, wrong, right)
    wrong[63, 63] = math.nan
    assert not is_close(torch, wrong, right)


def _graph(call: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(call)(torch.randn(8, 16), torch.randn(16, 32))
    return next(node for node in traced.graph.nodes if "mm" in str(node.target))


def test_an_elementwise_operation_is_a_fusible_epilogue_and_a_norm_is_not() -> None:
    assert has_fusible_epilogue(_graph(lambda a, b: torch.relu((a @ b).view(2, 4, 32)) * 2))
    assert not has_fusible_epilogue(_graph(lambda a, b: a @ b))
    assert not has_fusible_epilogue(_graph(lambda a, b: torch.var_mean(a @ b + 1, -1)[0]))
    assert not has_fusible_epilogue(None)


class _Tuner:
    """A generated kernel whose tilings take `ms` on the fake clock; each run adds one to its operand."""

    custom_kernel, reset_to_zero_arg_names, inductor_meta = False, (), {"spill_threshold": 16}
    device_props = SimpleNamespace(type="cuda")

    def __init__(self, *ms: float, spills: tuple[int, ...] = (), kind: str = "REDUCTION") -> None:
        self.heuristic_type = SimpleNamespace(name=kind)
        self.launchers = [self._launcher(tiling_ms, spills[i] if spills else 0) for i, tiling_ms in enumerate(ms)]

    @staticmethod
    def _launcher(ms: float, spills: int) -> Any:
        def launch(values: Any, stream: int) -> None:
            if _Graph.current is not None:
                _Graph.current.runs.append(lambda: launch(values, stream))
                return
            _Clock.now += ms
            values.add_(1)

        launch.n_spills = spills  # type: ignore[attr-defined]
        return launch

    @staticmethod
    def clone_args(values: Any) -> Any:
        return [values.clone()], {}


def test_tilings_are_timed_on_copies_of_the_operands() -> None:
    tuner, values = _Tuner(0.03, 0.01, 0.02, spills=(0, 64, 0)), torch.zeros(8)
    times = time_tilings(_Torch(), tuner, [values], {})
    assert [round(times[launcher], 6) for launcher in tuner.launchers] == [0.03, math.inf, 0.02]
    assert not values.any()


@pytest.mark.parametrize(
    "attributes",
    [
        {"custom_kernel": True},
        {"reset_to_zero_arg_names": ("x",)},
        {"launchers": []},
        {"device_props": SimpleNamespace(type="xpu")},
        {"heuristic_type": None},
    ],
)
def test_kernels_that_cannot_be_repeated_are_not_timed(attributes: dict[str, Any]) -> None:
    tuner = _Tuner(0.03, 0.02)
    vars(tuner).update(attributes)
    assert time_tilings(_Torch(), tuner, [torch.zeros(8)], {}) == {}


def test_an_error_while_timing_leaves_the_choice_to_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    autotuner, errors = heuristics.CachingAutotuner, []
    monkeypatch.setattr(autotuner, "benchmark_all_configs", lambda tuner, *args: {"original": 1.0})
    before = autotuner.benchmark_all_configs
    changes = contextlib.ExitStack()
    patch_autotuner(changes, errors.append, lambda: False)
    assert autotuner.benchmark_all_configs(SimpleNamespace(), torch.zeros(8)) == {"original": 1.0}
    assert isinstance(errors[0], AttributeError)
    changes.close()
    assert autotuner.benchmark_all_configs is before
