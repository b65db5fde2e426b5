"""Few-shot adaptation: measurements of another device mend a model where they can, and leave it alone where not."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.simulated import simulated_kernels
from tilewise.cli.tiles.app import tiles
from tilewise.costmodel import train
from tilewise.costmodel.data.collection import Collection, MeasuredKernel
from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.data.writing import write_collection
from tilewise.costmodel.metrics import opa
from tilewise.costmodel.models.adapted import adapt, adapt_model
from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.ranking import rank
from tilewise.errors import ConfigurationError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    kernels = simulated_kernels(24, seed=1)
    train(dataset_from_kernels(kernels[:16], kernels[16:]), "MLP", out_dir=folder, epochs=3, progress=False)
    return folder


def on_another_device(kernel):
    """Runtimes that also depend on a column in a way the base has not seen."""
    slower = 1.0 + 2.0 * (kernel.config_feat[:, 0] > np.median(kernel.config_feat[:, 0]))
    runtime = np.maximum(1, kernel.runtime * slower).astype(np.int64)
    return dataclasses.replace(kernel, runtime=runtime)


def some(kernel, count, seed=0):
    rows = np.random.default_rng(seed).permutation(kernel.n_configs)[:count]
    cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **cut)


def quality(model, kernels):
    return np.mean([opa(k.target, model.score(k)) for k in kernels])


def test_measurements_of_another_device_order_the_rest_of_it_better(base):
    kernels = [on_another_device(k) for k in simulated_kernels(8, seed=2)]
    adapted = adapt(base, kernels)
    assert adapted.record["adapted"]["kept"]
    assert quality(adapted, kernels) > quality(load_scorer(base), kernels) + 0.02


def test_what_teaches_nothing_leaves_the_base_as_it_is(base):
    rng = np.random.default_rng(0)
    kernels = simulated_kernels(3, seed=3)
    noise = [dataclasses.replace(k, runtime=rng.integers(1000, 9000, k.n_configs)) for k in kernels]
    adapted = adapt(base, [some(k, 6) for k in noise])
    assert not adapted.record["adapted"]["kept"]
    np.testing.assert_array_equal(adapted.score(kernels[0]), load_scorer(base).score(kernels[0]))


def test_an_adapted_model_comes_back_from_its_file(base, tmp_path):
    kernels = [on_another_device(k) for k in simulated_kernels(8, seed=2)]
    adapted = adapt(base, kernels)
    adapted.save(tmp_path / "mine.safetensors")
    again = load_scorer(tmp_path / "mine.safetensors")
    assert isinstance(again, Blend) and again.calibration is None
    np.testing.assert_array_equal(again.score(kernels[0]), adapted.score(kernels[0]))
    assert rank(tmp_path / "mine.safetensors", kernels[0]).top(3) == rank(adapted, kernels[0]).top(3)
    with pytest.raises(ConfigurationError, match="adapted already"):
        adapt(tmp_path / "mine.safetensors", kernels)


def test_a_blend_gets_one_more_part_and_one_kernel_is_enough_to_try(base):
    kernels = [on_another_device(k) for k in simulated_kernels(8, seed=2)]
    first = adapt(base, kernels)
    again = adapt_model(dataclasses.replace(first, record={}), kernels[:1])
    assert again.record["adapted"]["kernels"] == 1
    assert len(again.models) == 3 if again.record["adapted"]["kept"] else again.models == first.models


def test_too_few_measurements_are_one_sentence(base):
    with pytest.raises(ConfigurationError, match="needs 5"):
        adapt(base, [some(simulated_kernels(1, seed=4)[0], 3)])


def test_the_command_matches_columns_by_name(base, tmp_path):
    kernels = [on_another_device(k) for k in simulated_kernels(4, seed=2)]
    names = Schema().config_features
    reversed_kernels = [
        dataclasses.replace(k, config_feat=np.ascontiguousarray(k.config_feat[:, ::-1])) for k in kernels
    ]
    noise = [(np.full(k.n_configs, np.nan, np.float32), np.ones(k.n_configs, np.uint16)) for k in reversed_kernels]
    members = [MeasuredKernel(k, *n, {}) for k, n in zip(reversed_kernels, noise, strict=True)]
    write_collection(tmp_path / "mine.npz", Collection(Schema(names[::-1]), {"train": members}))
    out = tmp_path / "mine.safetensors"
    arguments = ["adapt", str(base), "--on", str(tmp_path / "mine.npz"), "--out", str(out), "--json"]
    done = CliRunner().invoke(tiles, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kernels"] == 4
    np.testing.assert_allclose(load_scorer(out).score(kernels[0]), adapt(base, kernels).score(kernels[0]), atol=1e-4)
    write_collection(tmp_path / "other.npz", Collection(Schema(tuple(f"x{i}" for i in range(24))), {"train": members}))
    arguments[3] = str(tmp_path / "other.npz")
    assert "lacks columns" in str(CliRunner().invoke(tiles, arguments).exception)
