"""Configurations as arrays: the same numbers as one by one, whether a family takes columns or not."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.space import ConfigSpace, config_row, space_of
from tools.gpu_visit import tiny_problems

OWN = ("warps", "stages", "group", "winograd")
GPU = [*tiny_problems(), Problem.of("reduction", dtype="fp32", rows=30, cols=40, axis=1, operation="max")]


def one_by_one(family, problem, configs) -> np.ndarray:
    return np.array([config_row(family, problem, config, OWN) for config in configs], np.float32)


@pytest.mark.parametrize("problem", GPU, ids=lambda problem: problem.family)
def test_columns_give_the_rows_of_each_configuration(problem):
    family = get_family(problem.family)
    configs = family.configs(problem)
    space = ConfigSpace(configs)
    np.testing.assert_array_equal(space.rows(family, problem, OWN), one_by_one(family, problem, configs))
    assert family.takes_columns


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("spec", [
    {"family": "matmul", "m": 65, "n": 33, "k": 129},
    {"family": "conv2d", "batch": 2, "channels": 5, "height": 9, "width": 9, "filters": 7, "kernel": 3},
    {"family": "int8_matmul", "m": 65, "n": 33, "k": 129},
], ids=lambda spec: spec["family"])  # fmt: skip
def test_a_cpu_familys_rows_are_those_of_each_configuration(spec):
    from tilewise.tune.families.cpu.family import get_family

    family = get_family(spec["family"])
    problem = family.problem(spec)
    configs = list(family.configs(problem))[:60]
    np.testing.assert_array_equal(ConfigSpace(configs).rows(family, problem, OWN), one_by_one(family, problem, configs))


class Fickle:
    """Right for columns only at first glance."""

    name = "fickle"

    def tile(self, problem, config):
        size = config.size("block")
        return {"kernel": [], "output": [size if isinstance(size, int) else size * 0 + 8], "input": [1]}


def test_a_family_that_misunderstands_columns_is_asked_one_by_one():
    configs = (Config.of(block=8), Config.of(block=16), Config.of(block=8))
    problem, family = Problem.of("fickle", m=1), Fickle()
    space = space_of(configs)
    for _ in range(2):
        np.testing.assert_array_equal(space.rows(family, problem, OWN), one_by_one(family, problem, configs))


def test_rows_that_have_not_changed_are_the_same_array():
    family = get_family("matmul")
    configs = family.configs(GPU[0])
    assert space_of(configs) is space_of(configs) and space_of(list(configs)) is not space_of(list(configs))
    other = Problem({**GPU[0], "m": 4096})
    rows = space_of(configs).rows(family, GPU[0], OWN)
    assert space_of(configs).rows(family, other, OWN) is rows
    np.testing.assert_array_equal(space_of(configs).fields, ConfigSpace(list(configs)).fields)


def test_rows_of_one_family_are_not_another_familys():
    configs = tuple(Config.of(block_m=16, block_n=n, block_k=32, warps=4, stages=2, group=1) for n in (16, 32))
    single, batched = get_family("matmul"), get_family("batched_matmul")
    sizes = {"dtype": "bf16", "m": 64, "n": 64, "k": 64, "epilogue": "none", "layout": "nt"}
    space, own = ConfigSpace(configs), ("warps", "stages")
    for family, more in ((single, {}), (batched, {"batch": 4}), (single, {}), (batched, {"batch": 8})):
        problem = Problem.of(family.name, **sizes, **more)
        each = [config_row(family, problem, config, own) for config in configs]
        np.testing.assert_array_equal(space.rows(family, problem, own), np.array(each, np.float32))
    np.testing.assert_array_equal(space.rows(batched, problem, ("stages",))[:, -1], [2, 2])


def test_settings_that_only_some_have_are_zero_for_the_others():
    configs = [Config.of(a=1), Config.of(b=3)]
    np.testing.assert_allclose(ConfigSpace(configs).fields, [[1.0, 0.0], [0.0, 2.0]])
