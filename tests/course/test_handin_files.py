"""What can be said of the hand-in without TensorFlow."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costmodel.simulated import simulated_kernels

from tilewise.costmodel.data import tpu_tiles
from tilewise.costmodel.data.dataset import dataset_from_kernels, load_dataset
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.features.scaling import MinMax

COURSE = Path(__file__).resolve().parents[2] / "course"


@pytest.mark.parametrize("handed_in", [False, True])
def test_models_py_stands_alone(handed_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (COURSE / "models.py").read_text(encoding="utf-8")
    if handed_in:
        monkeypatch.syspath_prepend(str(COURSE))
        from handin import standalone_models

        text = standalone_models()
        compile(text, "models.py", "exec")
    tree = ast.parse(text)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"tensorflow", "tensorflow_gnn", "numpy"}


def test_models_py_has_a_class_for_every_baseline() -> None:
    tree = ast.parse((COURSE / "models.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"MLP", "LateJoinSAGE", "EarlyJoinSAGE", "LateJoinResGCN", "EarlyJoinResGCN"} <= classes


def numpy_parts() -> dict[str, Any]:
    """The parts of models.py that need no TensorFlow."""
    tree = ast.parse((COURSE / "models.py").read_text(encoding="utf-8"))
    functions = {"RankerFeatures", "tiles", "load_bytes", "boundary", "log", "as_float32", "unscaled"}
    tree.body = [node for node in tree.body if getattr(node, "name", "") in functions]
    names: dict[str, Any] = {"np": np, "tpu_tiles": tpu_tiles}
    exec(compile(tree, "models.py", "exec"), names)
    return names


def simulated_splits() -> tuple[Any, Any]:
    kernels = simulated_kernels(12, seed=4)
    return dataset_from_kernels(kernels[:8], kernels[8:9]).train, kernels[9:]


def embedded_splits(name: str) -> tuple[Any, Any]:
    data = load_dataset(name, limit=40)
    return data.train, data.test[::4]


@pytest.mark.parametrize("collection", ["simulated", "h200", "cpu"])
def test_the_hand_in_reads_the_same_features_as_tile_ranker(collection: str) -> None:
    """A change of TileRanker's features must reach course/models.py too, or hand-ins would rank differently."""
    train, others = simulated_splits() if collection == "simulated" else embedded_splits(collection)
    fitted, scaling = RankerFeatures.fit(train), MinMax.fit(train)
    theirs = numpy_parts()["RankerFeatures"]({name: array.tolist() for name, array in fitted.tensors().items()})
    for kernel in others:
        ours, scaled = fitted.apply(kernel), scaling.apply(kernel)
        node, wide, own = theirs.apply(scaled.node, scaled.opcode, scaled.edges, scaled.config)
        np.testing.assert_array_equal(node, ours.node)
        np.testing.assert_array_equal(wide, ours.config[0, : fitted.global_width])
        np.testing.assert_array_equal(own, ours.config[:, fitted.global_width :])


def test_a_hand_in_trained_on_other_data_reads_the_graders_kernels() -> None:
    """A TileRanker of the toy data, which has columns of its own, on kernels in the dataset's format."""
    toy, tpu = load_dataset("h200", limit=40).train, dataset_from_kernels(*simulated_as_splits()).train
    fitted, grader = RankerFeatures.fit(toy), MinMax.fit(tpu)
    arrays = dict(fitted.tensors())
    constant = np.flatnonzero(arrays["node_low"] == arrays["node_high"])
    arrays["node_constant"] = np.stack([constant, arrays["node_low"][constant]], axis=1)
    arrays |= {"config_rest": arrays["config_low"]} | grader.tensors()
    theirs = numpy_parts()["RankerFeatures"]({name: array.tolist() for name, array in arrays.items()})
    for kernel in tpu:
        scaled = grader.apply(kernel)
        assert scaled.node.shape[1] != MinMax.fit(toy).node_width
        rest = np.tile(arrays["config_rest"][kernel.config_feat.shape[1] :], (kernel.n_configs, 1))
        whole = dataclasses.replace(kernel, config_feat=np.hstack([kernel.config_feat, rest]).astype(np.float32))
        ours = fitted.apply(whole)
        node, wide, own = theirs.apply(scaled.node, scaled.opcode, scaled.edges, scaled.config)
        np.testing.assert_array_equal(node, ours.node)
        np.testing.assert_array_equal(wide, ours.config[0, : fitted.global_width])
        np.testing.assert_array_equal(own, ours.config[:, fitted.global_width :])


def test_a_hand_in_without_the_graders_ranges_still_scores_every_configuration() -> None:
    toy, tpu = load_dataset("h200", limit=40).train, dataset_from_kernels(*simulated_as_splits()).train
    fitted, grader = RankerFeatures.fit(toy), MinMax.fit(tpu)
    theirs = numpy_parts()["RankerFeatures"]({name: array.tolist() for name, array in fitted.tensors().items()})
    for kernel in tpu:
        scaled = grader.apply(kernel)
        node, wide, own = theirs.apply(scaled.node, scaled.opcode, scaled.edges, scaled.config)
        assert (len(node), len(own)) == (len(kernel.node_feat), kernel.n_configs)
        assert all(np.isfinite(part).all() for part in (node, wide, own))


def simulated_as_splits() -> tuple[Any, Any]:
    kernels = simulated_kernels(12, seed=4)
    return kernels[:8], kernels[8:9]
