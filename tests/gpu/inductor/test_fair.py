"""Choices timed in turns and checked against ATen's, on a pretended GPU whose clock the test keeps."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.gpu.inductor.fair import _block_lists, near, retime
from tilewise.gpu.inductor.following import fuses_next
from tilewise.gpu.inductor.rest import time_in_turns, timed

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
    """PyTorch on the CPU with a pretended `cuda`."""

    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Meta:
    device, offset = "cpu", 0

    def __init__(self, *sizes: int, strides: tuple[int, ...] | None = None, dtype: Any = torch.bfloat16) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.strides = strides or tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))


class _Request:
    """A product that takes `ms` on the pretended clock, and is wrong by a factor."""

    has_out_variant = True

    def __init__(self, ms: float, factor: float = 1.0, library: bool = False) -> None:
        self.input_tensor_meta = [_Meta(24, 40, strides=(0, 1)), _Meta(24, 16), _Meta(16, 40, strides=(1, 16))]
        self.output_tensor_meta = _Meta(24, 40)
        self.ms, self.factor = ms, factor
        if library:
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
    def __init__(self, *given: Any, **named: Any) -> None:
        self.bmreq = _Request(*given, **named)


def test_choices_are_timed_anew_as_graphs() -> None:
    aten, slow, fast = _Choice(0.02, library=True), _Choice(0.05), _Choice(0.01)
    found = retime(_Torch(), {aten: 0.04, slow: 0.03, fast: 0.05})
    assert [round(found[choice], 6) for choice in (aten, slow, fast)] == [0.02, 0.05, 0.01]


def test_a_template_no_faster_than_chance_leaves_atens_call_first() -> None:
    aten, close = _Choice(0.02, library=True), _Choice(0.0199)
    found = retime(_Torch(), {aten: 0.04, close: 0.03})
    assert min(found, key=found.__getitem__) is aten


@pytest.mark.parametrize(("aten_ms", "ahead"), [(0.005, False), (0.05, True)])
def test_of_short_calls_a_template_has_to_save_a_tenth_of_a_microsecond_beside(aten_ms: float, ahead: bool) -> None:
    aten, template = _Choice(aten_ms, library=True), _Choice(aten_ms * 0.97)
    found = retime(_Torch(), {aten: 0.04, template: 0.03})
    assert (min(found, key=found.__getitem__) is template) == ahead


def test_a_result_that_is_not_atens_counts_as_none() -> None:
    aten, wrong = _Choice(0.02, library=True), _Choice(0.001, factor=1.2)
    found = retime(_Torch(), {aten: 0.04, wrong: 0.001})
    assert found[wrong] == math.inf and round(found[aten], 6) == 0.02


def test_without_aten_the_first_choice_is_the_one_to_beat() -> None:
    usual, close, ahead = _Choice(0.02), _Choice(0.0199), _Choice(0.015)
    found = retime(_Torch(), {usual: 0.04, close: 0.03})
    assert min(found, key=found.__getitem__) is usual
    found = retime(_Torch(), {usual: 0.04, ahead: 0.05})
    assert min(found, key=found.__getitem__) is ahead


def test_without_aten_a_result_that_is_not_the_first_ones_counts_as_none() -> None:
    usual, wrong, right = _Choice(0.02), _Choice(0.001, factor=1.2), _Choice(0.01)
    found = retime(_Torch(), {usual: 0.04, wrong: 0.001, right: 0.03})
    assert found[wrong] == math.inf and min(found, key=found.__getitem__) is right
    nobody_knows = _Choice(0.02, factor=math.nan)
    assert math.isfinite(retime(_Torch(), {nobody_knows: 0.04, right: 0.03})[right])


def test_what_the_compiler_could_not_run_is_not_run_again() -> None:
    aten, broken, other = _Choice(0.02, library=True), _Choice(0.01), _Choice(0.03)
    assert set(retime(_Torch(), {aten: 0.04, broken: math.inf, other: 0.03})) == {aten, other}
    assert retime(_Torch(), {aten: 0.04, broken: math.inf}) == {}


def test_a_choice_of_an_unknown_kind_leaves_the_compilers_times() -> None:
    assert retime(_Torch(), {_Choice(0.02, library=True): 0.04, object(): 0.01}) == {}


def test_lists_of_blocks_point_to_blocks_that_are_there() -> None:
    whole, tensors = torch.int32, [_Meta(2, 4, 256, 64)] * 3
    masked = [*tensors, *[_Meta(1, 1, 2, dtype=whole), _Meta(1, 1, 2, 6, dtype=whole)] * 2]
    cut, which, full, others = _block_lists(torch, masked).values()
    assert cut.tolist() == [1, 1] and full.tolist() == [3, 3]
    assert which.tolist() == others.tolist() == [0, 1, 2, 3, 4, 5] * 2
    alone = _block_lists(torch, [*tensors, _Meta(1, 1, 1, dtype=whole), _Meta(1, 1, 1, 1, dtype=whole)])
    assert [found.tolist() for found in alone.values()] == [[1], [0]]
    assert _block_lists(torch, tensors) == {}
    with pytest.raises(ValueError, match="no lists of blocks"):
        _block_lists(torch, [*masked, _Meta(9, dtype=whole)])


def test_one_wrong_element_is_seen_and_rounding_is_not() -> None:
    right = torch.randn(64, 64)
    wrong = right.clone()
    wrong[63, 63] += 1.0
    assert near(torch, right.bfloat16(), right) and not near(torch, wrong, right)
    wrong[63, 63] = math.nan
    assert not near(torch, wrong, right)


def _graph(call: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(call)(torch.randn(8, 16), torch.randn(16, 32))
    return next(node for node in traced.graph.nodes if "mm" in str(node.target))


def test_an_elementwise_operation_behind_a_product_may_be_taken_in_and_a_norm_is_not() -> None:
    assert fuses_next(_graph(lambda a, b: torch.relu((a @ b).view(2, 4, 32)) * 2))
    assert not fuses_next(_graph(lambda a, b: a @ b))
    assert not fuses_next(_graph(lambda a, b: torch.var_mean(a @ b + 1, -1)[0]))
    assert not fuses_next(None)


class _Tuner:
    """A kernel of the compiler's with tilings that take so long on the pretended clock; it adds to what it is given."""

    custom_kernel, reset_to_zero_arg_names, inductor_meta = False, (), {"spill_threshold": 16}
    device_props = SimpleNamespace(type="cuda")

    def __init__(self, *ms: float, spills: tuple[int, ...] = (), kind: str = "REDUCTION") -> None:
        self.heuristic_type = SimpleNamespace(name=kind)
        self.launchers = [self._launcher(one, spills[i] if spills else 0) for i, one in enumerate(ms)]

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


def test_tilings_of_other_kernels_take_turns_and_leave_the_programs_numbers_alone() -> None:
    tuner, values = _Tuner(0.03, 0.01, 0.02, spills=(0, 64, 0)), torch.zeros(8)
    found = timed(_Torch(), tuner, [values], {})
    assert [round(found[one], 6) for one in tuner.launchers] == [0.03, math.inf, 0.02]
    assert not values.any()


@pytest.mark.parametrize(
    "change",
    [
        {"custom_kernel": True},
        {"reset_to_zero_arg_names": ("x",)},
        {"launchers": []},
        {"device_props": SimpleNamespace(type="xpu")},
        {"heuristic_type": None},
    ],
)
def test_what_cannot_be_run_again_and_again_is_pytorchs_to_time(change: dict[str, Any]) -> None:
    tuner = _Tuner(0.03, 0.02)
    vars(tuner).update(change)
    assert timed(_Torch(), tuner, [torch.zeros(8)], {}) == {}


def test_an_error_in_taking_turns_leaves_the_choice_to_pytorch_and_disabling_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    owner, notes = heuristics.CachingAutotuner, []
    monkeypatch.setattr(owner, "benchmark_all_configs", lambda tuner, *given: {"pytorchs": 1.0})
    before = owner.benchmark_all_configs
    undo = time_in_turns(notes.append)
    assert owner.benchmark_all_configs(SimpleNamespace(), torch.zeros(8)) == {"pytorchs": 1.0}
    assert isinstance(notes[0], AttributeError)
    undo()
    assert owner.benchmark_all_configs is before
