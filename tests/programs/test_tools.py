"""The tools around random programs: a program survives JSON, a seed gives one program, failures become small."""

from __future__ import annotations

import numpy as np
import pytest

from tests.programs.draw import draw
from tests.programs.minimise import minimise
from tests.programs.network import NUMPY, FusedNetwork, Network, chains, run_eagerly
from tests.programs.operations import KINDS
from tests.programs.oracles import Mismatch, Run
from tests.programs.program import Op, Program

PROGRAMS = [draw(seed) for seed in range(300)]


def test_a_program_survives_json() -> None:
    assert all(Program.from_json(program.to_json()) == program for program in PROGRAMS)


def test_a_seed_gives_one_program() -> None:
    assert [draw(seed) for seed in range(20)] == PROGRAMS[:20]


def test_every_kind_of_operation_is_drawn() -> None:
    assert {op.kind for program in PROGRAMS for op in program.ops} == set(KINDS)


def test_operations_that_feed_only_the_next_are_one_chain() -> None:
    ops = (Op("a", (0,)), Op("b", (1,)), Op("c", (2,)), Op("add", (3, 1)), Op("d", (4,)))
    assert chains(ops) == [[0], [1, 2], [3], [4]]


def test_a_fused_network_computes_the_network() -> None:
    for program in PROGRAMS[:30]:
        network, x = Network(program), program.example()
        expected = run_eagerly(network, x, NUMPY)
        np.testing.assert_allclose(run_eagerly(FusedNetwork(network), x, NUMPY), expected, rtol=1e-4, atol=1e-4)


def test_a_failing_program_becomes_one_operation() -> None:
    # Without padding: a greedy step may shrink the input below a window, and the padding then has to stay.
    kinds = [{op.kind for op in p.ops} for p in PROGRAMS]
    program = next(
        p for p, k in zip(PROGRAMS, kinds, strict=True) if len(p.ops) > 10 and "max_pool" in k and "pad" not in k
    )
    small = minimise(program, lambda p: any(op.kind == "max_pool" for op in p.ops))
    assert [op.kind for op in small.ops] == ["max_pool"]
    assert small.shape[0] == 1


@pytest.mark.parametrize("change", [lambda y: y + 1e-3, lambda y: y[:-1], lambda y: y * np.nan])
def test_another_result_is_a_mismatch(change) -> None:
    run = Run(PROGRAMS[2])
    with pytest.raises(Mismatch, match="somewhere"):
        run.compare("somewhere", change(run.exact))
