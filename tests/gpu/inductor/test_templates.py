"""Which of PyTorch's templates are kept: ATen always beside them, a few, or the one that was measured before."""

from __future__ import annotations

import itertools
from typing import Any

from tilewise.gpu.inductor.templates import NO_CHOICE, Asked, columns_of, config_of, fits, keep, problem_of
from tilewise.gpu.products.family import LIBRARY
from tilewise.gpu.products.roofline import columns
from tilewise.gpu.products.runtimes import Runtimes, shipped_runtimes
from tilewise.store.problem import Config, Problem

Choices = tuple[list[str], list[dict[str, Any]]]


def _choices() -> Choices:
    """ATen, then PyTorch's exhaustive list for two templates."""
    names, parameters = ["aten::mm"], [{}]  # type: tuple[list[str], list[dict[str, Any]]]
    for template in ("triton::mm", "triton::mm_persistent_tma"):
        for m, n, k, stages, warps in itertools.product(*[(16, 32, 64, 128, 256)] * 3, (1, 2, 3, 4, 5), (2, 4, 8)):
            names.append(template)
            parameters.append({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_stages": stages, "num_warps": warps,
                               "GROUP_M": 8, "EVEN_K": True})  # fmt: skip
    return names, parameters


def _problem(m: int = 512, n: int = 2048, k: int = 1024) -> Problem:
    found = problem_of("mm", ((m, k), (k, 1)), ((k, n), (1, k)), "torch.bfloat16")
    assert found is not None
    return found


def _model() -> Runtimes:
    model = shipped_runtimes()
    assert model is not None
    return model


def test_the_problem_is_read_off_the_operands() -> None:
    problem = _problem(24, 96, 64)
    assert (problem.size("m"), problem.size("n"), problem.size("k"), problem.word("layout")) == (24, 96, 64, "nt")
    batched = problem_of("bmm", ((8, 5, 7), (35, 7, 1)), ((8, 7, 9), (63, 9, 1)), "torch.float16")
    assert batched is not None and batched.size("batch") == 8 and batched.word("layout") == "nn"


def test_what_there_is_no_model_for_is_no_problem() -> None:
    assert problem_of("mm", ((4, 4), (4, 1)), ((4, 4), (4, 1)), "torch.float32") is None
    assert problem_of("mm_plus_mm", ((4, 4), (4, 1)), ((4, 4), (4, 1)), "torch.bfloat16") is None


def test_columns_say_of_all_what_a_configuration_says_of_one() -> None:
    names, parameters = _choices()
    of = columns_of(names, parameters)
    configs = [config_of(name, given) for name, given in zip(names[1:], parameters[1:], strict=True)]
    for name, column in columns([config for config in configs if config is not None]).items():
        assert column.tolist() == of[name][1:].tolist(), name


def test_the_budget_and_aten_are_kept_and_all_of_it_fits() -> None:
    choices = _choices()
    for budget in (1, 3, 7):
        kept = keep(_model(), _problem(), choices, budget)
        assert 0 in kept.places and len(kept.places) <= budget + 1 and kept.considered == len(choices[0])
        assert all(fits(columns_of(*choices))[place] for place in kept.places if place)


def test_batched_templates_have_four_warps_and_three_stages_where_there_are_such() -> None:
    batched = problem_of("bmm", ((8, 512, 64), (32768, 64, 1)), ((8, 64, 512), (32768, 1, 64)), "torch.bfloat16")
    assert batched is not None
    names, parameters = ["aten::bmm", *_choices()[0][1:]], _choices()[1]
    kept = [parameters[place] for place in keep(_model(), batched, (names, parameters), 3).places if place]
    assert len(kept) == 3 and all(one["num_warps"] == 4 and one["num_stages"] > 2 for one in kept)
    others = [place for place, one in enumerate(parameters) if one.get("num_warps") != 4]
    shorter = [names[place] for place in others], [parameters[place] for place in others]
    assert len(keep(_model(), batched, shorter, 3).places) == 4


def test_what_was_measured_before_is_kept_alone() -> None:
    choices = _choices()
    first = keep(_model(), _problem(), choices, 3)
    place = first.places[-1]
    best = config_of(choices[0][place], choices[1][place])
    assert keep(_model(), _problem(), choices, 3, Asked(best)).places == (place,)
    assert keep(_model(), _problem(), choices, 3, Asked(LIBRARY)).places == (0,)


def test_a_remembered_template_that_is_gone_is_looked_for_again() -> None:
    gone = Config.of(block_m=48, block_n=48, block_k=48, warps=4, stages=2, group=8, tma=0)
    assert keep(_model(), _problem(), _choices(), 3, Asked(gone)).why != "remembered"


def test_of_a_list_without_aten_the_budget_is_kept_however_far_behind() -> None:
    names, parameters = _choices()
    for problem in (_problem(), _problem(8192, 8192, 8192)):
        kept = keep(_model(), problem, (names[1:], parameters[1:]), 3)
        assert kept.why == "measured" and len(kept.places) == 3
    assert not len([p for p in keep(_model(), _problem(8192, 8192, 8192), (names, parameters), 3).places if p])


def test_a_list_without_templates_that_the_model_knows_stays_as_it_is() -> None:
    kept = keep(_model(), _problem(), (["aten::mm", "decompose_k"], [{}, {}]), 3)
    assert kept.places == (0, 1) and kept.why == NO_CHOICE


def test_a_choice_is_the_same_every_time() -> None:
    choices = _choices()
    assert keep(_model(), _problem(), choices, 3).places == keep(_model(), _problem(), choices, 3).places
