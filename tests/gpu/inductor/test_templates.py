"""Template selection: ATen and a few templates within the budget, or the winner of an earlier measurement."""

from __future__ import annotations

import itertools
from typing import Any

from tilewise.gpu.inductor.templates import (
    Context,
    Reason,
    config_of,
    fits,
    problem_of,
    select_templates,
    template_columns,
)
from tilewise.gpu.products.roofline import CUBLAS, columns
from tilewise.gpu.products.runtime_model import RuntimeModel, shipped_runtime_model
from tilewise.store.problem import Config, Problem

Choices = tuple[list[str], list[dict[str, Any]]]


def _choices() -> Choices:
    """Return ATen and the exhaustive lists of two templates."""
    names, parameters = ["aten::mm"], [{}]  # type: tuple[list[str], list[dict[str, Any]]]
    for template in ("triton::mm", "triton::mm_persistent_tma"):
        for m, n, k, stages, warps in itertools.product(*[(16, 32, 64, 128, 256)] * 3, (1, 2, 3, 4, 5), (2, 4, 8)):
            names.append(template)
            parameters.append({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_stages": stages, "num_warps": warps,
                               "GROUP_M": 8, "EVEN_K": True})  # fmt: skip
    return names, parameters


def _problem(m: int = 512, n: int = 2048, k: int = 1024) -> Problem:
    problem = problem_of("mm", ((m, k), (k, 1)), ((k, n), (1, k)), "torch.bfloat16")
    assert problem is not None
    return problem


def _model() -> RuntimeModel:
    model = shipped_runtime_model()
    assert model is not None
    return model


def test_sizes_and_layout_come_from_the_operands() -> None:
    problem = _problem(24, 96, 64)
    assert (problem.size("m"), problem.size("n"), problem.size("k"), problem.word("layout")) == (24, 96, 64, "nt")
    batched = problem_of("bmm", ((8, 5, 7), (35, 7, 1)), ((8, 7, 9), (63, 9, 1)), "torch.float16")
    assert batched is not None and batched.size("batch") == 8 and batched.word("layout") == "nn"


def test_products_without_a_model_have_no_problem() -> None:
    assert problem_of("mm", ((4, 4), (4, 1)), ((4, 4), (4, 1)), "torch.float32") is None
    assert problem_of("mm_plus_mm", ((4, 4), (4, 1)), ((4, 4), (4, 1)), "torch.bfloat16") is None


def test_columns_match_the_single_configurations() -> None:
    names, parameters = _choices()
    of = template_columns(names, parameters)
    configs = [config_of(name, row) for name, row in zip(names[1:], parameters[1:], strict=True)]
    for name, column in columns([config for config in configs if config is not None]).items():
        assert column.tolist() == of[name][1:].tolist(), name


def test_a_selection_has_aten_and_fitting_templates_within_the_budget() -> None:
    choices = _choices()
    for budget in (1, 3, 7):
        selection = select_templates(_model(), _problem(), choices, budget)
        assert 0 in selection.indices and len(selection.indices) <= budget + 1
        assert selection.considered == len(choices[0])
        assert all(fits(template_columns(*choices))[i] for i in selection.indices if i)


def test_batched_templates_with_four_warps_and_three_stages_are_preferred() -> None:
    batched = problem_of("bmm", ((8, 512, 64), (32768, 64, 1)), ((8, 64, 512), (32768, 1, 64)), "torch.bfloat16")
    assert batched is not None
    names, parameters = ["aten::bmm", *_choices()[0][1:]], _choices()[1]
    tiles = [parameters[i] for i in select_templates(_model(), batched, (names, parameters), 3).indices if i]
    assert len(tiles) == 3 and all(tile["num_warps"] == 4 and tile["num_stages"] > 2 for tile in tiles)
    others = [i for i, row in enumerate(parameters) if row.get("num_warps") != 4]
    shorter = [names[i] for i in others], [parameters[i] for i in others]
    assert len(select_templates(_model(), batched, shorter, 3).indices) == 4


def test_an_earlier_winner_is_selected_alone() -> None:
    choices = _choices()
    first = select_templates(_model(), _problem(), choices, 3)
    last = first.indices[-1]
    best = config_of(choices[0][last], choices[1][last])
    assert select_templates(_model(), _problem(), choices, 3, Context(best)).indices == (last,)
    assert select_templates(_model(), _problem(), choices, 3, Context(CUBLAS)).indices == (0,)


def test_an_earlier_winner_that_is_not_listed_is_ignored() -> None:
    unlisted = Config.of(block_m=48, block_n=48, block_k=48, warps=4, stages=2, group=8, tma=0)
    assert select_templates(_model(), _problem(), _choices(), 3, Context(unlisted)).reason != "remembered"


def test_without_aten_the_budget_is_selected_however_slow() -> None:
    names, parameters = _choices()
    for problem in (_problem(), _problem(8192, 8192, 8192)):
        selection = select_templates(_model(), problem, (names[1:], parameters[1:]), 3)
        assert selection.reason == "measured" and len(selection.indices) == 3
    with_aten = select_templates(_model(), _problem(8192, 8192, 8192), (names, parameters), 3)
    assert with_aten.indices == (0,)


def test_a_list_of_unknown_templates_is_left_unchanged() -> None:
    selection = select_templates(_model(), _problem(), (["aten::mm", "decompose_k"], [{}, {}]), 3)
    assert selection.indices == (0, 1) and selection.reason is Reason.NO_MODEL


def test_selection_is_deterministic() -> None:
    choices = _choices()
    first, second = (select_templates(_model(), _problem(), choices, 3) for _ in range(2))
    assert first.indices == second.indices
