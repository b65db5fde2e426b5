"""Ten thousand damaged files of every kind the cost model reads: each is one sentence or a right result, nothing else.

The damage is drawn from fixed seeds: cut short, bytes changed, stretches replaced, stretches reversed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from course.test_flags import ARGS

from costmodel.data.test_dataset import mutate
from costmodel.hlo.test_featurize import called_module, check_consistent, tuning_data
from costmodel.simulated import simulated_kernels, write_npz
from course import flags as course
from tilewise.costmodel import featurize_hlo
from tilewise.costmodel.course.predictions import read_predictions, write_kaggle
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.schema import Schema, read_schema
from tilewise.costmodel.data.shards import read_kernel
from tilewise.costmodel.data.writing import write_collection
from tilewise.costmodel.hlo.tuning_data import convert_tuning_data
from tilewise.errors import TilewiseError

CSV = "ID,TopConfigs\n" + "".join(f"tile:xla:{i:032x},{i};{i + 1};3;4;5\n" for i in range(20))


def check_npz(path: Path) -> None:
    kernel = read_kernel(path, 24)
    assert np.isfinite(kernel.config_feat).all() and (kernel.edge_index < kernel.n_nodes).all()


def check_csv(path: Path) -> None:
    assert all(row and min(row) >= 0 for row in read_predictions(path).values())
    write_kaggle(path.with_name("kaggle.csv"), path, None)
    assert path.with_name("kaggle.csv").read_text().count("\n") == 1 + 844 + 50
    path.with_name("kaggle.csv").unlink()


def check_pb(path: Path) -> None:
    for file in convert_tuning_data(path, path.with_name("out")).files:
        assert read_kernel(file, 24).runtime.min() > 1


def check_schema(path: Path) -> None:
    assert read_schema(path.parent).width > 0


def check_collection(path: Path) -> None:
    for members in read_collection(path).splits.values():
        assert all(np.isfinite(m.kernel.node_feat).all() for m in members)


def check_run(path: Path) -> None:
    assert isinstance(course.read_run(path)["args"]["model"], str)


def originals(folder: Path) -> dict[str, tuple[str, bytes, Callable[[Path], None]]]:
    kernels = simulated_kernels(3, seed=1, n_configs=12)
    members = [MeasuredKernel(k, np.zeros(12, np.float32), np.ones(12, np.uint16), {}) for k in kernels]
    write_collection(folder / "c.npz", Collection(Schema(), {"train": members, "valid": [], "test": []}))
    return {
        "npz": ("m_1.npz", write_npz(kernels[0], folder).read_bytes(), check_npz),
        "pb": ("prog.pb", tuning_data().SerializeToString(), check_pb),
        "hlo": ("m.pb", called_module().SerializeToString(), lambda p: check_consistent(featurize_hlo(p.read_bytes()))),
        "csv": ("p.csv", CSV.encode(), check_csv),
        "jsonz": ("run_1.jsonz", gzip.compress(json.dumps(ARGS).encode(), mtime=0), check_run),
        "json": ("schema.json", b'{"config_features": ["a", "b_0", "c"], "hardware": {"x": [1, 2]}}', check_schema),
        "collection": ("d.npz", (folder / "c.npz").read_bytes(), check_collection),
    }


def run(folder: Path, kind: str, times: int, seed: int) -> None:
    name, content, check = originals(folder)[kind]
    rng, work = np.random.default_rng(seed), folder / "work"
    work.mkdir()
    outcomes = {"read": 0, "refused": 0}
    for _ in range(times):
        (work / name).write_bytes(mutate(content, rng))
        before = {path for path in work.rglob("*") if path.is_file()}
        try:
            check(work / name)
            outcomes["read"] += 1
        except TilewiseError as error:
            assert "\n" not in str(error)
            assert {path for path in work.rglob("*") if path.is_file()} == before  # no partial output
            outcomes["refused"] += 1
    assert outcomes["refused"] > times // 10


KINDS = ["npz", "pb", "hlo", "csv", "jsonz", "json", "collection"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_one_sentence_or_a_right_result(tmp_path: Path, kind: str) -> None:
    run(tmp_path, kind, times=40, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_damaged_files_are_one_sentence_or_a_right_result(tmp_path: Path, kind: str) -> None:
    run(tmp_path, kind, times=1500, seed=1)
