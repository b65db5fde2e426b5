"""From a store to files: runs merged, wrong results left out, splits that share no shape, one file that reads back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.costmodel import load_dataset
from tilewise.costmodel.data.collection import Collection, read_collection
from tilewise.costmodel.data.dataset import embedded_collections
from tilewise.costmodel.data.writing import write_collection
from tilewise.errors import FileFormatError, TilewiseError
from tilewise.gpu.families.family import get_family
from tilewise.store.aggregate import MeasuredProblem, open_measurements, read_measured
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store, Verdict
from tilewise.tune.measure.export import embed, export_folder, make_collection, merge_collections

MACHINE = Machine("triton", "Test GPU", {"name": "Test GPU", "triton": "3"})


def matmul(program: str = "gpt2_bf16_b1", m: int = 64) -> Kernel:
    return Kernel(program, Problem.of("matmul", dtype="bf16", m=m, n=32, k=16, epilogue="none", layout="nn"))


def configs(kernel: Kernel, count: int) -> list[Config]:
    return list(get_family("matmul").configs(kernel.problem)[:count])


def fill(store: Store, kernel: Kernel, runs: list[dict[str, object]], machine: Machine = MACHINE) -> None:
    """Each run: `default` and `times` (by place of the configuration) of each of its batches, and `finish`."""
    for run in runs:
        number = store.begin(machine, 0, {"rounds": 3})
        assert store.claim(number, kernel)
        choices = configs(kernel, 5)
        store.add_verdicts(number, kernel, [Verdict(c, "ok") for c in choices])
        for default_ns, times, disturbed in run["batches"]:  # type: ignore[attr-defined]
            timings = [(choices[place], ns) for place, ns in times.items()]
            store.add_batch(number, kernel, 0, default_ns, timings, disturbed=disturbed)
        if run["finish"]:
            store.finish(number, kernel, choices[0], 1.0)


def runtimes(entry: MeasuredProblem) -> dict[int, float]:
    order = configs(entry.kernel, 5)
    return {order.index(t.config): t.runtime_ns for t in entry.timings}


def test_a_runtime_is_the_median_of_undisturbed_timings_and_the_default_is_among_them(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        batches = [
            (100.0, {1: 200.0, 2: 50.0}, False),
            (101.0, {1: 210.0, 2: 51.0}, False),
            (102.0, {1: 220.0, 2: 52.0}, False),
            (300.0, {1: 900.0, 2: 900.0}, True),
        ]
        fill(store, matmul(), [{"batches": batches, "finish": True}])
        (measured_problem,) = read_measured(store)
    assert runtimes(measured_problem) == {0: 101.0, 1: 210.0, 2: 51.0}
    assert measured_problem.default_ns == 101.0
    assert {t.repeats for t in measured_problem.timings} == {3}


def test_disturbed_timings_count_where_there_are_no_others_and_a_single_one_does_not(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        batches = [
            (100.0, {1: 200.0, 2: 50.0}, False),
            (100.0, {1: 204.0, 3: 70.0}, True),
            (100.0, {3: 72.0}, True),
        ]
        fill(store, matmul(), [{"batches": batches, "finish": True}])
        (measured_problem,) = read_measured(store)
    assert runtimes(measured_problem) == {0: 100.0, 1: 202.0, 3: 71.0}


def test_the_default_is_its_own_normalizer_where_one_batch_alone_was_undisturbed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        batches = [(100.0, {1: 50.0}, False), (110.0, {1: 54.0}, True), (112.0, {1: 55.0}, True)]
        fill(store, matmul(), [{"batches": batches, "finish": True}])
        (measured_problem,) = read_measured(store)
    assert runtimes(measured_problem)[0] == measured_problem.default_ns


def test_an_interrupted_run_is_scaled_by_its_default(tmp_path: Path) -> None:
    slow = [(200.0, {1: 400.0}, False), (200.0, {1: 400.0}, False)]
    fast = [(100.0, {1: 201.0}, False), (100.0, {1: 199.0}, False)]
    with Store(tmp_path / "s.sqlite") as store:
        fill(store, matmul(), [{"batches": slow, "finish": False}, {"batches": fast, "finish": True}])
        (measured_problem,) = read_measured(store)
    assert runtimes(measured_problem) == {0: 100.0, 1: 200.0}
    assert measured_problem.timings[1].deviation < 0.01


def test_a_configuration_found_wrong_in_any_run_is_never_exported(tmp_path: Path) -> None:
    batches = [(100.0, {1: 10.0, 2: 50.0}, False)] * 3
    with Store(tmp_path / "s.sqlite") as store:
        fill(store, matmul(), [{"batches": batches, "finish": True}])
        number = store.begin(MACHINE, 1, {})
        store.add_verdicts(number, matmul(), [Verdict(configs(matmul(), 2)[1], "wrong", "it differs")])
        (measured_problem,) = read_measured(store)
        assert set(runtimes(measured_problem)) == {0, 2}
        (kernel,) = make_collection(store, "own").splits["train"]
    assert kernel.kernel.n_configs == 2


def two_programs(path: Path, second_m: int = 48) -> None:
    batches = [(100.0, {1: 10.0, 2: 50.0}, False)] * 3
    with Store(path) as store:
        for kernel in (matmul(), matmul("llama3_8b_bf16_b1x1024", second_m)):
            fill(store, kernel, [{"batches": batches, "finish": True}])


def test_a_folder_and_one_file_load_as_the_same_dataset(tmp_path: Path) -> None:
    two_programs(tmp_path / "s.sqlite")
    with open_measurements(tmp_path / "s.sqlite") as store:
        collection = make_collection(store, "own")
    export_folder(collection, tmp_path / "folder")
    embed(collection, tmp_path / "one.npz")
    folder = load_dataset(tmp_path / "folder", cache_dir=tmp_path / "cache", progress=False)
    file = load_dataset(tmp_path / "one.npz")
    assert folder.schema == file.schema
    assert json.loads((tmp_path / "folder/schema.json").read_text())["hardware"] == "Test GPU"
    for name in ("train", "test"):
        a, b = folder.split(name)[0], file.split(name)[0]
        assert a.name == b.name
        for key in ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer"):
            np.testing.assert_array_equal(getattr(a, key), getattr(b, key))


def test_kernels_whose_tiles_differ_by_less_than_the_noise_can_be_left_out(tmp_path: Path) -> None:
    clear = [(100.0, {1: 10.0 + i, 2: 50.0 + i}, False) for i in range(3)]
    chance = [(100.0 + 9 * i, {1: 99.0 + i, 2: 101.0 - 4 * i}, False) for i in range(3)]
    with Store(tmp_path / "s.sqlite") as store:
        fill(store, matmul(), [{"batches": clear, "finish": True}])
        fill(store, matmul("gpt2_bf16", 96), [{"batches": chance, "finish": True}])
        assert len(make_collection(store, "own").splits["train"]) == 2
        (member,) = make_collection(store, "own", telling=5.0).splits["train"]
    assert member.problem["m"] != 96


def test_a_shape_in_two_splits_is_refused_with_a_sentence(tmp_path: Path) -> None:
    kernel = Kernel("gpt2_bf16", Problem.of("matmul", dtype="bf16", m=8, n=32, k=16, epilogue="none", layout="nn"))
    other = Kernel("llama3_8b_x", Problem.of("matmul", dtype="fp16", m=8, n=32, k=16, epilogue="none", layout="nt"))
    batches = [(100.0, {1: 10.0, 2: 50.0}, False)] * 3
    with Store(tmp_path / "s.sqlite") as store:
        for each in (kernel, other):
            fill(store, each, [{"batches": batches, "finish": True}])
        with pytest.raises(TilewiseError, match="is in train and in test"):
            make_collection(store, "own")


def test_kernels_of_two_machines_stand_in_one_collection_each_told_its_own(tmp_path: Path) -> None:
    batches = [(100.0, {1: 10.0, 2: 50.0}, False)] * 3
    parts = []
    for name, lanes in (("One CPU (avx2)", 8), ("Two CPU (avx512)", 16)):
        with Store(tmp_path / f"{lanes}.sqlite") as store:
            machine = Machine("triton", name, {"features": {"machine_lanes": lanes}})
            fill(store, matmul(), [{"batches": batches, "finish": True}], machine)
            parts.append(make_collection(store, "part"))
    both = merge_collections(parts, "both")
    column = both.schema.config_features.index("machine_lanes")
    first, second = both.splits["train"]
    assert first.kernel.name != second.kernel.name
    assert set(first.kernel.config_feat[:, column]) == {8.0}
    assert set(second.kernel.config_feat[:, column]) == {16.0}
    assert [machine["hardware"] for machine in both.schema.extra["machines"]] == ["One CPU (avx2)", "Two CPU (avx512)"]
    embed(both, tmp_path / "both.npz")
    assert len(load_dataset(tmp_path / "both.npz").train) == 2


def test_an_empty_store_and_a_missing_one_are_one_sentence(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store, pytest.raises(TilewiseError, match="no finished kernel"):
        make_collection(store, "own")
    with pytest.raises(FileFormatError, match="does not exist"), open_measurements(tmp_path / "none.sqlite"):
        pass
    with pytest.raises(FileFormatError, match="contains no store"), open_measurements(tmp_path):
        pass


@pytest.mark.parametrize(("table", "what"), [("machine", "without a machine"), ("run", "without a run")])
def test_a_store_without_machines_or_runs_is_one_sentence(tmp_path: Path, table: str, what: str) -> None:
    import sqlite3

    two_programs(tmp_path / "s.sqlite")
    with sqlite3.connect(tmp_path / "s.sqlite") as connection:
        connection.execute(f"DELETE FROM {table}")
    with open_measurements(tmp_path / "s.sqlite") as store, pytest.raises(FileFormatError, match=what):
        make_collection(store, "own")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    two_programs(folder / "s.sqlite")
    with open_measurements(folder / "s.sqlite") as store:
        embed(make_collection(store, "own"), folder / "one.npz")
    return (folder / "one.npz").read_bytes()


@given(st.data())
def test_a_damaged_file_is_one_sentence_or_reads(
    small_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    with contextlib.suppress(FileFormatError):
        assert isinstance(read_collection(path), Collection)


def test_writing_again_gives_the_same_bytes(small_file: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(small_file)
    write_collection(tmp_path / "b.npz", read_collection(tmp_path / "a.npz"))
    assert (tmp_path / "b.npz").read_bytes() == small_file


@pytest.mark.parametrize("name", embedded_collections())
def test_embedded_collections_load_and_no_shape_is_in_two_splits(name: str) -> None:
    dataset = load_dataset(name)
    assert min(len(dataset.train), len(dataset.valid), len(dataset.test)) > 0
    owner: dict[bytes, str] = {}
    for split in ("train", "valid", "test"):
        for kernel in dataset.split(split):
            graph = kernel.node_feat.tobytes() + kernel.node_opcode.tobytes()
            assert owner.setdefault(graph, split) == split, kernel.name
            assert (kernel.target > 0).all()
            assert (np.abs(kernel.target - 1) < 1e-6).any(), "the default configuration is among them"


def test_the_embedded_gpu_collection_is_as_large_and_quiet_as_promised() -> None:
    from tilewise.costmodel.data.dataset import embedded_folder

    collection = read_collection(embedded_folder() / "h200.npz")
    every = [member for members in collection.splits.values() for member in members]
    assert len(every) >= 300
    assert len({member.problem["family"] for member in every}) >= 6
    assert sum(member.kernel.n_configs for member in every) >= 60_000
    assert np.median(np.concatenate([member.deviation for member in every])) <= 0.01
    assert min(int(member.repeats.min()) for member in every) >= 2
