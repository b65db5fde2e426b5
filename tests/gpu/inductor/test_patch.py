"""Installing tilewise in PyTorch's compiler: settings are restored, errors are contained, records persist."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import tilewise.inductor
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.gpu.inductor.decision_log import DecisionLog, report
from tilewise.gpu.inductor.templates import Reason, Selection
from tilewise.gpu.products.roofline import CUBLAS
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Store

torch = pytest.importorskip("torch")
inductor_config = pytest.importorskip("torch._inductor.config")


class _Node:
    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.sizes, self.strides = sizes, strides

    def get_size(self) -> tuple[int, ...]:
        return self.sizes

    def get_stride(self) -> tuple[int, ...]:
        return self.strides

    def get_dtype(self) -> Any:
        return torch.bfloat16


class KernelInputs:
    """PyTorch's kernel inputs for a product of 256 x 512 x 128, on a fake device."""

    device_type = "fake"

    def __init__(self) -> None:
        self.pair = (_Node((256, 128), (128, 1)), _Node((128, 512), (1, 128)))

    def nodes(self) -> list[_Node]:
        return list(self.pair)

    def mat1mat2(self) -> tuple[_Node, _Node]:
        return self.pair

    def shapes_hinted(self) -> tuple[tuple[int, ...], ...]:
        return tuple(node.sizes for node in self.pair)

    def strides_hinted(self) -> tuple[tuple[int, ...], ...]:
        return tuple(node.strides for node in self.pair)


class _Template:
    def __init__(self, uid: str) -> None:
        self.uid = uid


class _Choice:
    """A template with its parameters, annotated like a choice that PyTorch has benchmarked."""

    def __init__(self, uid: str, **parameters: int) -> None:
        self.template, self.parameters = _Template(uid), parameters
        self.params = self
        self.annotations = {"ktc": self}

    def to_kwargs(self) -> dict[str, int]:
        return self.parameters


def template_list() -> list[_Choice]:
    """Return ATen and the exhaustive list of PyTorch's own CUDA heuristic."""
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    tiles = [_Choice("triton::mm", BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, num_stages=c.num_stages,
                     num_warps=c.num_warps, GROUP_M=c.group_m) for c in heuristics.exhaustive_configs]  # fmt: skip
    return [_Choice("aten::mm"), *tiles]


def _handler() -> Any:
    return inductor_config.inductor_choices_class()


def _select(choices: list[_Choice], inputs: Any = None) -> list[_Choice]:
    handler, inputs = _handler(), inputs or KernelInputs()
    selected: list[_Choice] = handler._finalize_template_configs({"all": iter(choices)}, inputs, [], "mm")
    return selected


def test_products_without_a_model_are_listed_as_without_tilewise(enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(_: Any, inputs: Any, templates: Any, op: str) -> tuple[str, bool, bool]:
        config = inductor_config
        tma = config.triton.enable_persistent_tma_matmul
        return config.max_autotune_gemm_search_space, config.max_autotune_gemm, tma

    monkeypatch.setattr("torch._inductor.choices.InductorChoices.get_template_configs", settings)
    inputs, list_templates = KernelInputs(), _handler().get_template_configs
    assert list_templates(inputs, [], "mm") == ("EXHAUSTIVE", True, True)
    default = ("DEFAULT", False, False)
    assert list_templates(inputs, [], "scaled_mm") == list_templates(object(), [], "int_mm") == default
    monkeypatch.setattr(_Node, "get_dtype", lambda _: torch.float32)
    assert list_templates(inputs, [], "mm") == ("DEFAULT", False, False)
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE" and not enabled.advisor.notes


def test_without_aten_templates_are_listed_for_products_without_a_model(
    enabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "torch._inductor.choices.InductorChoices.get_template_configs"
    monkeypatch.setattr(
        method, lambda *_: (inductor_config.max_autotune_gemm_search_space, inductor_config.max_autotune_gemm)
    )
    with inductor_config.patch(max_autotune_gemm_backends="TRITON"):
        assert _handler().get_template_configs(object(), [], "int_mm") == ("DEFAULT", True)


@pytest.mark.parametrize("cause", ["unknown templates", "an error"])
def test_a_list_that_cannot_be_ranked_is_replaced_by_pytorchs_default_list(
    enabled: Any, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    tiles = [_Choice("aten::mm"), *(_Choice("unknown", TILE=n) for n in range(900))]
    if cause == "an error":
        monkeypatch.setattr(enabled.advisor, "model", None)
        tiles = template_list()

    def list_templates(handler: Any, inputs: Any, templates: Any, op: str) -> Any:
        long = inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"
        return handler._finalize_template_configs({"all": tiles if long else tiles[:20]}, inputs, templates, op)

    monkeypatch.setattr("torch._inductor.choices.InductorChoices.get_template_configs", list_templates)
    assert _handler().get_template_configs(KernelInputs(), [], "mm") == tiles[:20]
    assert len(enabled.advisor.notes) == (cause == "an error")
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"


def test_graphs_on_other_devices_are_compiled_as_without_tilewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_fx = pytest.importorskip("torch._inductor.compile_fx")

    def settings(graph: Any, inputs: Any) -> tuple[bool, str]:
        return inductor_config.max_autotune_gemm, inductor_config.max_autotune_gemm_search_space

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", settings)
    graph = torch.fx.symbolic_trace(lambda x: x @ x)
    for node, value in zip(graph.graph.nodes, (torch.ones(2, 2), (torch.ones(2, 2), 3), None), strict=True):
        node.meta["val"] = value
    for device, expected in (("fake", (False, "DEFAULT")), ("cpu", (True, "EXHAUSTIVE"))):
        with tilewise.inductor.enable(records=tmp_path, devices=(device,)):
            assert compile_fx._compile_fx_inner(graph, []) == expected
            assert inductor_config.max_autotune_gemm
    assert compile_fx._compile_fx_inner is settings


@pytest.fixture
def enabled(tmp_path: Path) -> Any:
    with tilewise.inductor.enable(budget=3, records=tmp_path, devices=("fake",)) as state:
        assert state.active, state.reason
        yield state


def test_importing_the_package_does_not_import_pytorch() -> None:
    code = "import sys, tilewise.gpu.inductor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_gpu_pytorch_chooses_by_itself_with_one_warning() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = inductor_config.save_config_portable()
    with pytest.warns(UserWarning, match=r"^tilewise.inductor: PyTorch sees no CUDA GPU; PyTorch chooses by itself\.$"):
        enabled = tilewise.inductor.enable()
    assert not enabled.active and inductor_config.save_config_portable() == before


def test_a_pytorch_without_the_hooks_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.select_algorithm as select

    monkeypatch.delattr(select, "add_feedback_saver")
    with pytest.warns(UserWarning, match="does not offer what tilewise needs"):
        assert not tilewise.inductor.enable(devices=("fake",)).active
    assert inductor_config.inductor_choices_class is None


@pytest.mark.parametrize("budget", [-1, True, 2.5, "3"])
def test_a_budget_that_is_not_a_natural_number_is_rejected(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="budget"):
        tilewise.inductor.enable(budget=budget)


def test_settings_are_restored(tmp_path: Path) -> None:
    tag, before = torch.compiler.config.cache_key_tag, inductor_config.max_autotune_gemm_search_space
    tilewise.inductor.enable(records=tmp_path, devices=("fake",))
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"
    assert torch.compiler.config.cache_key_tag != tag
    tilewise.inductor.disable()
    assert (torch.compiler.config.cache_key_tag, inductor_config.max_autotune_gemm_search_space) == (tag, before)
    assert inductor_config.inductor_choices_class is None


class _BenchmarkedChoice:
    """A choice as the compiler benchmarks it: with the listed template in its annotations."""

    def __init__(self, kernel_choices: Any) -> None:
        self.annotations = {"ktc": kernel_choices}


@pytest.mark.parametrize("way", ["budget", "pin", "deterministic"])
def test_nothing_is_benchmarked_if_nothing_may_be_measured(way: str, tmp_path: Path) -> None:
    import torch._inductor.select_algorithm as select_algorithm

    pinned = tilewise.pin(lock=tmp_path / "tilewise.lock") if way == "pin" else None
    enabled = tilewise.inductor.enable(budget=3 if way != "budget" else 0, records=tmp_path, devices=("fake",))
    with enabled, inductor_config.patch(deterministic=way == "deterministic"):
        assert enabled.advisor.is_unmeasured
        choices = template_list()
        (selected,) = _select(choices)
        assert _select(template_list())[0].parameters == selected.parameters
        # PyTorch's deterministic mode would take ATen; it takes tilewise's choice.
        candidates = [_BenchmarkedChoice(choices[0]), _BenchmarkedChoice(selected)]
        pick = select_algorithm.AlgorithmSelectorCache.pick_deterministic_choice
        assert pick(None, candidates).annotations["ktc"] is selected  # type: ignore[arg-type]
    if pinned is not None:
        pinned.undo()
        assert "inductor.mm" in (tmp_path / "tilewise.lock").read_text()


def test_a_locked_template_is_selected_again(tmp_path: Path) -> None:
    path = tmp_path / "tilewise.lock"
    for _ in range(2):
        with tilewise.pin(lock=path), tilewise.inductor.enable(records=tmp_path, devices=("fake",)):
            (selected,) = _select(template_list())
            text = path.read_text()
            before = path.stat().st_mtime_ns
    assert path.read_text() == text and path.stat().st_mtime_ns == before
    with tilewise.pin(lock=path, frozen=True), tilewise.inductor.enable(records=tmp_path, devices=("fake",)):
        assert [one.parameters for one in _select(template_list())] == [selected.parameters]
        inputs = KernelInputs()
        inputs.pair = (_Node((64, 128), (128, 1)), _Node((128, 512), (1, 128)))
        with pytest.raises(TilewiseError, match=r"has no choice for inductor\.mm"):
            _select(template_list(), inputs)


def test_settings_without_benchmarks_hold_inside_of_the_users_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_fx = pytest.importorskip("torch._inductor.compile_fx")
    settings = lambda graph, inputs: (inductor_config.deterministic, inductor_config.coordinate_descent_tuning)  # noqa: E731
    monkeypatch.setattr(compile_fx, "_compile_fx_inner", settings)
    graph = torch.fx.symbolic_trace(lambda x: x @ x)
    for node in graph.graph.nodes:
        node.meta["val"] = torch.ones(2, 2)
    enabled = tilewise.inductor.enable(budget=0, records=tmp_path, devices=("cpu",))
    with enabled, inductor_config.patch(coordinate_descent_tuning=True):
        assert compile_fx._compile_fx_inner(graph, []) == (True, False)


def test_isolation_tests_templates_in_a_subprocess(tmp_path: Path) -> None:
    before = inductor_config.autotune_in_subproc
    with tilewise.inductor.enable(records=tmp_path, devices=("fake",), isolated=True):
        assert inductor_config.autotune_in_subproc
    assert inductor_config.autotune_in_subproc == before


def test_a_few_of_the_exhaustive_list_and_aten_are_selected(enabled: Any) -> None:
    choices = template_list()
    selected = _select(choices)
    assert len(choices) > 1000 and choices[0] in selected and len(selected) <= 4


def test_choices_on_other_devices_are_not_changed(enabled: Any) -> None:
    inputs = KernelInputs()
    inputs.device_type = "xpu"
    assert len(_select(template_list()[:50], inputs)) == 50


def test_an_internal_error_keeps_pytorchs_choices_and_is_noted(enabled: Any) -> None:
    assert len(_select(template_list()[:50], object())) == 50
    assert enabled.advisor.notes


def test_a_product_is_not_measured_twice(enabled: Any, tmp_path: Path) -> None:
    selected = _select(template_list())
    timings = {choice: 1.0 if choice is selected[-1] else 2.0 for choice in selected}
    enabled.advisor.on_feedback(timings, "mm", KernelInputs().nodes(), selected, None, {})
    again = tilewise.inductor.enable(records=tmp_path, devices=("fake",))
    assert [choice.parameters for choice in _select(template_list())] == [selected[-1].parameters]
    tilewise.inductor.disable()
    assert again.active and report(tmp_path)["remembered"] == 1


def test_invalid_feedback_is_noted_and_not_recorded(enabled: Any, tmp_path: Path) -> None:
    enabled.advisor.on_feedback({object(): 1.0}, "mm", [], [], None, {})
    assert enabled.advisor.notes and not (tmp_path / "choices.jsonl").exists()


def test_the_cache_key_changes_with_the_budget(enabled: Any, tmp_path: Path) -> None:
    first = _handler().uuid()
    tilewise.inductor.enable(budget=5, records=tmp_path, devices=("fake",))
    assert first != _handler().uuid()
    tilewise.inductor.disable()


def test_records_are_read_back_without_damaged_lines(tmp_path: Path) -> None:
    problem = Problem.of("inductor", op="mm", batch=1, m=8, n=16, k=32, dtype="bf16", layout="nt", epilogue="none")
    tile = Config.of(block_m=16, block_n=32, block_k=64, warps=4, stages=3, group=8, tma=0)
    log = DecisionLog("a machine", tmp_path)
    log.add_decision(problem, Selection((0, 1), Reason.BENCHMARK, 100, 1e-3))
    log.add_measurements(problem, [(CUBLAS, 2e-5), (tile, 1e-5)], 0.5)
    with (tmp_path / "decisions.jsonl").open("a") as stream:
        stream.write('{"why": "measured", "problem": 7}\nnot json\n[1]\n')
    with Store(log.memory.store_file, create=False) as store:
        (kernel,) = store.kernels()
        (batch,) = store.batches(kernel)
    assert kernel.problem == problem and batch.runtime_ns == {CUBLAS.key: 20000, tile.key: 10000}
    summary = report(tmp_path)
    assert (summary["products"], summary["considered"], summary["kept"]) == (1, 100, 2)
    assert summary["rows"][0]["of_aten"] == pytest.approx(2.0)
    assert DecisionLog("a machine", tmp_path).best(problem) == tile
    assert DecisionLog("another", tmp_path).best(problem) is None


def test_a_folder_that_cannot_be_written_loses_only_the_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = Problem.of("inductor", op="mm", batch=1, m=8, n=16, k=32, dtype="bf16", layout="nt", epilogue="none")
    log = DecisionLog("a machine", tmp_path / "file" / "below")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add_decision(problem, Selection((0,), Reason.BENCHMARK, 1, 0.0))
        log.add_measurements(problem, [(CUBLAS, 1e-5)], 0.0)


def test_a_list_without_aten_is_reduced_to_the_budget(enabled: Any) -> None:
    aten, *tiles = template_list()
    assert _select([aten]) == [aten]
    assert 0 < len(_select(tiles)) <= 3
    assert len(_select(tiles)) == 3  # ATen is in no list: the user excluded it


def test_a_list_without_aten_is_empty_if_aten_was_fastest(enabled: Any) -> None:
    aten, *tiles = template_list()
    _select([aten])
    selected = _select(tiles)
    timings = {choice: 1.0 if choice is aten else 2.0 for choice in (aten, *selected)}
    enabled.advisor.on_feedback(timings, "mm", KernelInputs().nodes(), selected, None, {})
    _select([aten])
    assert _select(tiles) == []


class _Tensor:
    def __init__(self, *shape: int, dtype: str = "torch.bfloat16") -> None:
        self.shape, self.dtype = shape, dtype


class _CallNode:
    """A node of an FX graph whose arguments are tensors."""

    def __init__(self, *tensors: _Tensor) -> None:
        self.args = [self._argument(tensor) for tensor in tensors]

    @staticmethod
    def _argument(tensor: _Tensor) -> Any:
        node = _Template("argument")
        node.meta = {"val": tensor}  # type: ignore[attr-defined]
        return node


def test_attention_tilings_are_compared_with_the_default_unless_one_is_certain(
    enabled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    tilings = heuristics.flex_attn_fwd_autotune_configs
    default = heuristics.h100_default_flex_config[(torch.bfloat16, 64)]
    node, select = _CallNode(*[_Tensor(2, 8, 1024, 64)] * 3), enabled.advisor.select_attention
    certain = select(default, tilings, node)
    assert len(certain) == 1 and certain[0] != default and certain[0] in tilings
    assert [(row["why"], row["kept"], row["fastest"]) for row in report(tmp_path)["rows"]] == [("sure", 1, "")]
    smallest = next(tiling for tiling in tilings if (tiling.block_m, tiling.block_n) == (64, 64))
    for first in (smallest, default):  # no tiling needs less than the default, or none is far enough ahead
        monkeypatch.setattr("tilewise.gpu.inductor.templates._CERTAIN_GAIN", 0.12 if first is smallest else math.inf)
        selected = select(first, tilings, node)
        assert selected[0] == first and 1 < len(selected) <= 4 and first not in selected[1:]
        assert all(tiling in tilings for tiling in selected[1:])
    assert select(default, tilings, _CallNode(*[_Tensor(2, 8, 9, 64, dtype="torch.float32")] * 3)) == []
    assert select(default, tilings, _CallNode(*[_Tensor(2, 8, 9, 512)] * 3)) == []


class _TritonConfig:
    """A stand-in for `triton.Config`: Triton may not be installed."""

    def __init__(self, of: Any) -> None:
        self.kwargs = {"BLOCK_M": of.block_m, "BLOCK_N": of.block_n, "BLOCK_K": of.block_k}
        self.num_stages, self.num_warps = of.num_stages, of.num_warps


def test_convolution_templates_are_reduced_to_the_budget(enabled: Any) -> None:
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    configs = [_TritonConfig(c) for c in heuristics.conv_configs]
    selected = enabled.advisor.select_convolution(configs, (16 * 56 * 56, 128, 64 * 9), "torch.bfloat16")
    assert len(configs) > 3 and 0 < len(selected) <= 3 and all(config in configs for config in selected)
    assert enabled.advisor.select_convolution(configs, (16 * 56 * 56, 128, 64 * 9), "torch.float32") == []
    with inductor_config.patch(max_autotune=True):  # the user asks for it
        assert enabled.advisor.select_convolution(configs, (16 * 56 * 56, 128, 64 * 9), "torch.float32") == configs


def test_on_a_gpu_without_a_model_pytorch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Other GPU")
    before = inductor_config.save_config_portable()
    with pytest.warns(UserWarning, match=r"there is no model for Other GPU.*; PyTorch chooses by itself\.$"):
        assert not tilewise.inductor.enable().active
    assert inductor_config.save_config_portable() == before


class _Reduction:
    """PyTorch's description of a reduction over rows of `length` elements with `buffers` operands and results."""

    def __init__(self, length: int, buffers: int = 6, hint: str = "INNER") -> None:
        hints = pytest.importorskip("torch._inductor.runtime.hints").ReductionHint
        self.reduction_numel, self.buffers, self.hint = length, buffers, hints[hint]

    def get_reduction_hint(self) -> Any:
        return self.hint

    def buf_accesses(self) -> dict[str, list[Any]]:
        return {f"buf{number}": [] for number in range(self.buffers)}


class _CurrentGraph:
    """The graph that is being compiled, on the fake device."""

    device = "fake"

    def __init__(self) -> None:
        self.sizevars = self

    def get_current_device_or_throw(self) -> Any:
        return type("Device", (), {"type": self.device})

    def statically_known_leq(self, left: int, right: int) -> bool:
        return left <= right


def test_rows_that_fit_are_kept_in_registers(enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    graph, handler = _CurrentGraph(), _handler()

    def is_persistent(reduction: Any, cooperative: bool = False) -> bool:
        with V.set_graph_handler(graph):
            return bool(handler.should_use_persistent_reduction(reduction, cooperative))

    assert is_persistent(_Reduction(1280)) and is_persistent(_Reduction(8192)) and not is_persistent(_Reduction(8200))
    assert not is_persistent(_Reduction(8192, buffers=30)) and not is_persistent(_Reduction(1280, hint="OUTER"))
    assert not is_persistent(_Reduction(1280), cooperative=True)
    with inductor_config.patch({"triton.persistent_reductions": False}):
        assert not is_persistent(_Reduction(1280))
    graph.device = "cpu"
    assert not is_persistent(_Reduction(1280)) and not enabled.advisor.notes
    assert not is_persistent(object()) and not enabled.advisor.notes  # reductions on other devices are not inspected
    graph.device = "fake"
    assert not is_persistent(object()) and len(enabled.advisor.notes) == 1
    tilewise.inductor.disable()
    assert not is_persistent(_Reduction(1280))
