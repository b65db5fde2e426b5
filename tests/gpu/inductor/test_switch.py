"""PyTorch's compiler with tilewise in and out: settings put back, errors that cost nothing, records that survive."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import tilewise.inductor
from tilewise.errors import ConfigurationError
from tilewise.gpu.inductor.records import Book, summary
from tilewise.gpu.products.family import LIBRARY
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


class _Inputs:
    """What PyTorch hands over for a product of 256 x 512 x 128, on a pretended device."""

    device_type = "pretended"

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


class _Named:
    def __init__(self, uid: str) -> None:
        self.uid = uid


class _Choice:
    """A template with its parameters, as PyTorch makes them; its own annotation, as a measured one carries it."""

    def __init__(self, uid: str, **given: int) -> None:
        self.template, self.given = _Named(uid), given
        self.params = self
        self.annotations = {"ktc": self}

    def to_kwargs(self) -> dict[str, int]:
        return self.given


def _listed() -> list[_Choice]:
    """ATen, and what PyTorch's own CUDA heuristic lists when it is asked for everything."""
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    tiles = [_Choice("triton::mm", BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, num_stages=c.num_stages,
                     num_warps=c.num_warps, GROUP_M=c.group_m) for c in heuristics.exhaustive_configs]  # fmt: skip
    return [_Choice("aten::mm"), *tiles]


def _handler() -> Any:
    return inductor_config.inductor_choices_class()


def _ask(found: list[_Choice], inputs: Any = None) -> list[_Choice]:
    answer: list[_Choice] = _handler()._finalize_template_configs({"all": iter(found)}, inputs or _Inputs(), [], "mm")
    return answer


def test_what_there_is_no_model_for_is_listed_as_without_tilewise(
    enabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(_: Any, inputs: Any, templates: Any, op: str) -> tuple[str, bool, bool]:
        found = inductor_config
        return found.max_autotune_gemm_search_space, found.max_autotune_gemm, found.triton.enable_persistent_tma_matmul

    monkeypatch.setattr("torch._inductor.choices.InductorChoices.get_template_configs", listed)
    inputs, asked = _Inputs(), _handler().get_template_configs
    assert asked(inputs, [], "mm") == ("EXHAUSTIVE", True, True)
    assert asked(inputs, [], "scaled_mm") == asked(object(), [], "int_mm") == ("DEFAULT", False, False)
    monkeypatch.setattr(_Node, "get_dtype", lambda _: torch.float32)
    assert asked(inputs, [], "mm") == ("DEFAULT", False, False)
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE" and not enabled.advisor.notes


def test_where_the_user_left_aten_out_templates_are_listed_for_what_there_is_no_model_for(
    enabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "torch._inductor.choices.InductorChoices.get_template_configs"
    monkeypatch.setattr(
        listed, lambda *_: (inductor_config.max_autotune_gemm_search_space, inductor_config.max_autotune_gemm)
    )
    with inductor_config.patch(max_autotune_gemm_backends="TRITON"):
        assert _handler().get_template_configs(object(), [], "int_mm") == ("DEFAULT", True)


@pytest.mark.parametrize("broken", ["nothing known", "an error"])
def test_a_list_that_cannot_be_ranked_is_made_again_as_pytorch_would(
    enabled: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    tiles = [_Choice("aten::mm"), *(_Choice("of another time", TILE=n) for n in range(900))]
    if broken == "an error":
        monkeypatch.setattr(enabled.advisor, "model", None)
        tiles = _listed()

    def listed(handler: Any, inputs: Any, templates: Any, op: str) -> Any:
        long = inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"
        return handler._finalize_template_configs({"all": tiles if long else tiles[:20]}, inputs, templates, op)

    monkeypatch.setattr("torch._inductor.choices.InductorChoices.get_template_configs", listed)
    assert _handler().get_template_configs(_Inputs(), [], "mm") == tiles[:20]
    assert len(enabled.advisor.notes) == (broken == "an error")
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"


def test_graphs_on_other_devices_are_compiled_as_without_tilewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = pytest.importorskip("torch._inductor.compile_fx")

    def seen(graph: Any, inputs: Any) -> tuple[bool, str]:
        return inductor_config.max_autotune_gemm, inductor_config.max_autotune_gemm_search_space

    monkeypatch.setattr(compiling, "_compile_fx_inner", seen)
    graph = torch.fx.symbolic_trace(lambda x: x @ x)
    for node, value in zip(graph.graph.nodes, (torch.ones(2, 2), (torch.ones(2, 2), 3), None), strict=True):
        node.meta["val"] = value
    for device, found in (("pretended", (False, "DEFAULT")), ("cpu", (True, "EXHAUSTIVE"))):
        with tilewise.inductor.enable(records=tmp_path, devices=(device,)):
            assert compiling._compile_fx_inner(graph, []) == found
            assert inductor_config.max_autotune_gemm
    assert compiling._compile_fx_inner is seen


@pytest.fixture
def enabled(tmp_path: Path) -> Any:
    with tilewise.inductor.enable(budget=3, records=tmp_path, devices=("pretended",)) as found:
        assert found.active, found.reason
        yield found


def test_importing_the_integration_imports_no_pytorch() -> None:
    code = "import sys, tilewise.gpu.inductor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_gpu_pytorch_chooses_by_itself_and_is_told_in_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = inductor_config.save_config_portable()
    with pytest.warns(UserWarning, match=r"^tilewise.inductor: PyTorch sees no CUDA GPU; PyTorch chooses by itself\.$"):
        found = tilewise.inductor.enable()
    assert not found.active and inductor_config.save_config_portable() == before


def test_a_pytorch_without_the_hooks_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.select_algorithm as select

    monkeypatch.delattr(select, "add_feedback_saver")
    with pytest.warns(UserWarning, match="does not offer what tilewise needs"):
        assert not tilewise.inductor.enable(devices=("pretended",)).active
    assert inductor_config.inductor_choices_class is None


@pytest.mark.parametrize("budget", [0, -1, True, 2.5, "3"])
def test_a_budget_is_a_count(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="budget"):
        tilewise.inductor.enable(budget=budget)


def test_settings_are_put_back(tmp_path: Path) -> None:
    tag, before = torch.compiler.config.cache_key_tag, inductor_config.max_autotune_gemm_search_space
    tilewise.inductor.enable(records=tmp_path, devices=("pretended",))
    assert inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"
    assert torch.compiler.config.cache_key_tag != tag
    tilewise.inductor.disable()
    assert (torch.compiler.config.cache_key_tag, inductor_config.max_autotune_gemm_search_space) == (tag, before)
    assert inductor_config.inductor_choices_class is None


def test_templates_may_be_tried_in_a_process_of_their_own(tmp_path: Path) -> None:
    before = inductor_config.autotune_in_subproc
    with tilewise.inductor.enable(records=tmp_path, devices=("pretended",), isolated=True):
        assert inductor_config.autotune_in_subproc
    assert inductor_config.autotune_in_subproc == before


def test_of_pytorchs_exhaustive_list_a_few_are_kept_beside_aten(enabled: Any) -> None:
    found = _listed()
    kept = _ask(found)
    assert len(found) > 1000 and found[0] in kept and len(kept) <= 4


def test_other_devices_and_operations_keep_pytorchs_choices(enabled: Any) -> None:
    inputs = _Inputs()
    inputs.device_type = "xpu"
    assert len(_ask(_listed()[:50], inputs)) == 50


def test_an_error_inside_costs_nothing_but_a_note(enabled: Any) -> None:
    assert len(_ask(_listed()[:50], object())) == 50
    assert enabled.advisor.notes


def test_the_same_product_is_not_measured_twice(enabled: Any, tmp_path: Path) -> None:
    kept = _ask(_listed())
    timings = {choice: 1.0 if choice is kept[-1] else 2.0 for choice in kept}
    enabled.advisor.measured(timings, "mm", _Inputs().nodes(), kept, None, {})
    again = tilewise.inductor.enable(records=tmp_path, devices=("pretended",))
    assert [choice.given for choice in _ask(_listed())] == [kept[-1].given]
    tilewise.inductor.disable()
    assert again.active and summary(tmp_path).remembered == 1


def test_feedback_that_makes_no_sense_is_noted_and_passed_over(enabled: Any, tmp_path: Path) -> None:
    enabled.advisor.measured({object(): 1.0}, "mm", [], [], None, {})
    assert enabled.advisor.notes and not (tmp_path / "choices.jsonl").exists()


def test_a_handler_tells_caches_what_decides(enabled: Any, tmp_path: Path) -> None:
    first = _handler().uuid()
    tilewise.inductor.enable(budget=5, records=tmp_path, devices=("pretended",))
    assert first != _handler().uuid()
    tilewise.inductor.disable()


def test_records_come_back_and_damaged_lines_do_not(tmp_path: Path) -> None:
    problem = Problem.of("inductor", op="mm", batch=1, m=8, n=16, k=32, dtype="bf16", layout="nt", epilogue="none")
    tile = Config.of(block_m=16, block_n=32, block_k=64, warps=4, stages=3, group=8, tma=0)
    book = Book("a machine", tmp_path)
    book.decided(problem, "measured", 100, 2, 1e-3)
    book.measured(problem, [(LIBRARY, 2e-5), (tile, 1e-5)], 0.5)
    with (tmp_path / "decisions.jsonl").open("a") as stream:
        stream.write('{"why": "measured", "problem": 7}\nnot json\n[1]\n')
    with Store(book.store_file, create=False) as store:
        (kernel,) = store.kernels()
        (batch,) = store.batches(kernel)
    assert kernel.problem == problem and batch.runtime_ns == {LIBRARY.key: 20000, tile.key: 10000}
    found = summary(tmp_path)
    assert (found.products, found.considered, found.kept) == (1, 100, 2) and found.rows[0].of_aten == pytest.approx(2.0)
    assert Book("a machine", tmp_path).best(problem) == tile and Book("another", tmp_path).best(problem) is None


def test_a_folder_that_cannot_be_written_costs_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = Problem.of("inductor", op="mm", batch=1, m=8, n=16, k=32, dtype="bf16", layout="nt", epilogue="none")
    book = Book("a machine", tmp_path / "file" / "below")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        book.decided(problem, "measured", 1, 1, 0.0)
        book.measured(problem, [(LIBRARY, 1e-5)], 0.0)


def test_templates_in_a_list_without_aten_are_kept_by_the_budget_where_aten_was_listed_before(enabled: Any) -> None:
    aten, *tiles = _listed()
    assert _ask([aten]) == [aten]
    assert 0 < len(_ask(tiles)) <= 3
    assert len(_ask(tiles)) == 3  # nobody listed ATen for this one: PyTorch was told to leave it out


def test_where_aten_was_the_fastest_a_list_without_it_is_left_empty(enabled: Any) -> None:
    aten, *tiles = _listed()
    _ask([aten])
    kept = _ask(tiles)
    timings = {choice: 1.0 if choice is aten else 2.0 for choice in (aten, *kept)}
    enabled.advisor.measured(timings, "mm", _Inputs().nodes(), kept, None, {})
    _ask([aten])
    assert _ask(tiles) == []


class _Tensor:
    def __init__(self, *shape: int, dtype: str = "torch.bfloat16") -> None:
        self.shape, self.dtype = shape, dtype


class _Called:
    """A node of the compiler's graph whose arguments are tensors."""

    def __init__(self, *tensors: _Tensor) -> None:
        self.args = [self._argument(tensor) for tensor in tensors]

    @staticmethod
    def _argument(tensor: _Tensor) -> Any:
        node = _Named("argument")
        node.meta = {"val": tensor}  # type: ignore[attr-defined]
        return node


def test_flexible_attention_is_measured_beside_pytorchs_tiling_unless_a_smaller_one_is_well_ahead(
    enabled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    tuned = heuristics.flex_attn_fwd_autotune_configs
    usual = heuristics.h100_default_flex_config[(torch.bfloat16, 64)]
    node, asked = _Called(*[_Tensor(2, 8, 1024, 64)] * 3), enabled.advisor.attention
    alone = asked(usual, tuned, node)
    assert len(alone) == 1 and alone[0] != usual and alone[0] in tuned
    assert [(row.why, row.kept, row.fastest) for row in summary(tmp_path).rows] == [("sure", 1, "")]
    smallest = next(one for one in tuned if (one.block_m, one.block_n) == (64, 64))
    for first in (smallest, usual):  # none that needs less than the usual one, or none that is far enough ahead
        monkeypatch.setattr("tilewise.gpu.inductor.attention._SURE", 0.12 if first is smallest else math.inf)
        kept = asked(first, tuned, node)
        assert (
            kept[0] == first and 1 < len(kept) <= 4 and first not in kept[1:] and all(one in tuned for one in kept[1:])
        )
    assert asked(usual, tuned, _Called(*[_Tensor(2, 8, 9, 64, dtype="torch.float32")] * 3)) == []
    assert asked(usual, tuned, _Called(*[_Tensor(2, 8, 9, 512)] * 3)) == []


class _Tiling:
    """What Triton calls a configuration, which this machine may not have."""

    def __init__(self, of: Any) -> None:
        self.kwargs = {"BLOCK_M": of.block_m, "BLOCK_N": of.block_n, "BLOCK_K": of.block_k}
        self.num_stages, self.num_warps = of.num_stages, of.num_warps


def test_of_a_convolutions_templates_the_budget_is_kept(enabled: Any) -> None:
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    found = [_Tiling(c) for c in heuristics.conv_configs]
    kept = enabled.advisor.convolution(found, (16 * 56 * 56, 128, 64 * 9), "torch.bfloat16")
    assert len(found) > 3 and 0 < len(kept) <= 3 and all(config in found for config in kept)
    assert enabled.advisor.convolution(found, (16 * 56 * 56, 128, 64 * 9), "torch.float32") == []
    with inductor_config.patch(max_autotune=True):  # the user's own wish
        assert enabled.advisor.convolution(found, (16 * 56 * 56, 128, 64 * 9), "torch.float32") == found


def test_a_gpu_without_a_model_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU of another kind")
    before = inductor_config.save_config_portable()
    with pytest.warns(
        UserWarning, match=r"there is no model for a GPU of another kind.*; PyTorch chooses by itself\.$"
    ):
        assert not tilewise.inductor.enable().active
    assert inductor_config.save_config_portable() == before


class _Sum:
    """What PyTorch tells of a sum over rows of so many elements, with so many operands and results."""

    def __init__(self, length: int, buffers: int = 6, hint: str = "INNER") -> None:
        hints = pytest.importorskip("torch._inductor.runtime.hints").ReductionHint
        self.reduction_numel, self.buffers, self.hint = length, buffers, hints[hint]

    def get_reduction_hint(self) -> Any:
        return self.hint

    def buf_accesses(self) -> dict[str, list[Any]]:
        return {f"buf{number}": [] for number in range(self.buffers)}


class _Compiling:
    """The graph that the compiler is at, on the pretended device."""

    device = "pretended"

    def __init__(self) -> None:
        self.sizevars = self

    def get_current_device_or_throw(self) -> Any:
        return type("Device", (), {"type": self.device})

    def statically_known_leq(self, left: int, right: int) -> bool:
        return left <= right


def test_rows_that_fit_stay_in_registers(enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    graph, handler = _Compiling(), _handler()

    def kept(of: Any, cooperative: bool = False) -> bool:
        with V.set_graph_handler(graph):
            return bool(handler.should_use_persistent_reduction(of, cooperative))

    assert kept(_Sum(1280)) and kept(_Sum(8192)) and not kept(_Sum(8200))
    assert not kept(_Sum(8192, buffers=30)) and not kept(_Sum(1280, hint="OUTER"))
    assert not kept(_Sum(1280), cooperative=True)
    with inductor_config.patch({"triton.persistent_reductions": False}):
        assert not kept(_Sum(1280))
    graph.device = "cpu"
    assert not kept(_Sum(1280)) and not enabled.advisor.notes
    assert not kept(object()) and not enabled.advisor.notes  # another device is not looked at
    graph.device = "pretended"
    assert not kept(object()) and len(enabled.advisor.notes) == 1
    tilewise.inductor.disable()
    assert not kept(_Sum(1280))
