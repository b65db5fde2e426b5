"""Every reader of files: how a good file of it is made, and how what was read is used.

Use matters as much as reading: a file that loads and fails in the first product is no better than one that fails at
once.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from costmodel.simulated import simulated_kernels, write_npz

from fuzz import boards
from fuzz.damage import (
    Rng,
    in_checked_json,
    in_gzip,
    in_header,
    in_json,
    in_lines,
    in_npz,
    in_store,
    in_tensors,
)

Damage = Callable[[bytes, Rng], bytes]
TENSORS: Sequence[Damage] = (in_tensors, in_tensors, in_header)
TARGETS: dict[str, Callable[[Path], Target]] = {}


@dataclass(frozen=True)
class Target:
    """A good file, how to read and use it, what damage goes inside it, and what ends what was started."""

    place: Path
    use: Callable[[Path], object]
    inside: Sequence[Damage] = ()
    close: Callable[[], object] = lambda: None


def target(make: Callable[[Path], Target]) -> Callable[[Path], Target]:
    TARGETS[make.__name__] = make
    return make


def run(model: object, *shape: int) -> object:
    from tilewise import Tensor, no_grad

    with no_grad():
        return model(Tensor(np.zeros(shape, np.float32)))  # type: ignore[operator]


# --- tensors and networks ---


@target
def tensors(folder: Path) -> Target:
    import tilewise as tw

    tw.save({"a": np.ones((2, 3), np.float32), "b": np.zeros(0), "c": np.array(3)}, folder / "x", {"made": "here"})
    return Target(folder / "x", lambda path: [t.sum() for t in tw.load(path).values()], TENSORS)


@target
def saved_models(folder: Path) -> Target:
    from tilewise import models, save
    from tilewise.models.saved import load_saved

    save(models.cnn(), folder / "x")

    def use(path: Path) -> None:
        name, model = load_saved(path)
        first = next(iter(dict(model.named_tensors()).values())).shape
        run(model, *((1, first[1]) if name == "mlp" else (1, first[1], 8, 8)))

    return Target(folder / "x", use, TENSORS)


@target
def gpt(folder: Path) -> Target:
    from tilewise import save
    from tilewise.generate import generate
    from tilewise.generate.gpt2 import load_gpt
    from tilewise.nn import GPT

    save(GPT(2, 64, 1, 20, 16), folder / "x")
    return Target(folder / "x", lambda path: list(generate(load_gpt(path), [1, 2], 2)), TENSORS)


@target
def gpt2(folder: Path) -> Target:
    from tilewise import save
    from tilewise.generate import generate
    from tilewise.generate.gpt2 import _BLOCK, _TOP, _TRANSPOSED, load_gpt
    from tilewise.nn import GPT

    state = {name: np.asarray(value) for name, value in GPT(1, 64, 1, 20, 16).state_dict().items()}
    state_by_name = {theirs: state[ours] for theirs, ours in _TOP.items()}
    for theirs, ours in _BLOCK.items():
        array = state[f"blocks.0.{ours}"]
        state_by_name[f"h.0.{theirs}"] = array.T if theirs.endswith(_TRANSPOSED) else array
    save(state_by_name, folder / "x")
    return Target(folder / "x", lambda path: list(generate(load_gpt(path), [1, 2], 2)), TENSORS)


def small_quantized() -> object:
    from tilewise import models
    from tilewise.quantize import quantize

    rng = np.random.default_rng(0)
    return quantize(models.cnn().eval(), [rng.standard_normal((4, 1, 8, 8)).astype(np.float32)])


@target
def quantized(folder: Path) -> Target:
    from tilewise.quantize import load_quantized, save_quantized

    save_quantized(small_quantized(), folder / "x")  # type: ignore[arg-type]
    return Target(folder / "x", lambda path: run(load_quantized(path), 2, 1, 8, 8), TENSORS)


@target
def dynamically_quantized(folder: Path) -> Target:
    """A network with a norm between linear layers, which is saved as a traced graph."""
    from tilewise import nn
    from tilewise.quantize import load_quantized, quantize, save_quantized

    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()
    batch = np.random.default_rng(0).standard_normal((4, 5, 8)).astype(np.float32)
    save_quantized(quantize(model, [batch]), folder / "x")
    return Target(folder / "x", lambda path: run(load_quantized(path), 2, 5, 8), TENSORS)


@target
def pruned_quantized(folder: Path) -> Target:
    from tilewise import models
    from tilewise.prune import prune
    from tilewise.prune.int8 import load_pruned, save_pruned
    from tilewise.quantize import quantize

    rng = np.random.default_rng(0)
    model = prune(models.cnn(), 0.8).eval()
    model = getattr(model, "model", model)
    save_pruned(quantize(model, [rng.standard_normal((4, 1, 8, 8)).astype(np.float32)]), folder / "x")
    return Target(folder / "x", lambda path: run(load_pruned(path), 2, 1, 8, 8), TENSORS)


def _pruned_weight(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) * (rng.random(shape) < 0.2)).astype(np.float32)


@target
def sparse_linear(folder: Path) -> Target:
    from tilewise.prune.sparse import SparseLinear

    SparseLinear.from_weights(_pruned_weight(12, 20), np.ones(12, np.float32)).save(folder / "x")

    def use(path: Path) -> None:
        layer = SparseLinear.load(path)
        run(layer, 3, layer.in_features)

    return Target(folder / "x", use, TENSORS)


@target
def sparse_conv(folder: Path) -> Target:
    from tilewise.prune.conv import SparseConv2d

    SparseConv2d.from_weights(_pruned_weight(8, 4, 3, 3), np.ones(8, np.float32), (1, 1), (1, 1)).save(folder / "x")

    def use(path: Path) -> None:
        layer = SparseConv2d.load(path)
        run(layer, 1, layer.in_channels, 6, 6)

    return Target(folder / "x", use, TENSORS)


@target
def sparse_int8(folder: Path) -> Target:
    from tilewise.prune.int8 import SparseInt8Linear

    q = (_pruned_weight(12, 20) * 50).astype(np.int8)
    SparseInt8Linear(q, np.ones(12, np.float32), np.ones(12, np.float32)).save(folder / "x")

    def use(path: Path) -> None:
        layer = SparseInt8Linear.load(path)
        run(layer, 3, layer.in_features)

    return Target(folder / "x", use, TENSORS)


@target
def calibration(folder: Path) -> Target:
    from tilewise import models
    from tilewise.quantize import Calibration, calibrate, quantize

    model = models.mlp().eval()
    calibrate(model, [np.ones((4, 64), np.float32)]).save(folder / "x.json")
    return Target(folder / "x.json", lambda path: run(quantize(model, Calibration.load(path)), 2, 64), (in_json,))


@target
def fit_checkpoint(folder: Path) -> Target:
    from tilewise.fit.loop import CHECKPOINT, Trainer
    from tilewise.fit.tasks import recipe_for

    recipe = recipe_for("mlp", epochs=2)
    Trainer(recipe, folder, 50).save()

    def use(path: Path) -> None:
        trainer = Trainer(recipe, folder, 50)
        trainer.resume()
        for batch in itertools.islice(trainer.task.batches(), 1):
            trainer.step(batch)

    return Target(folder / CHECKPOINT, use, TENSORS)


# --- the cost model ---


@functools.cache
def kernels() -> list:
    return simulated_kernels(12, seed=1, n_configs=12)


def _trained(name: str, folder: Path) -> Path:
    from tilewise.costmodel import train
    from tilewise.costmodel.data.dataset import dataset_from_kernels

    data = dataset_from_kernels(kernels()[:8], kernels()[8:])
    more = {"trees": 3, "threads": 1} if name == "GBDT" else {}
    settings = {"model_kwargs": more} if more else {"epochs": 1}
    train(data, name, out_dir=folder, progress=False, **settings)
    return folder / "model.safetensors"


def _scored(name: str, torch: bool) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        from tilewise.costmodel import load_model, load_scorer, rank

        load = load_model if torch else load_scorer
        return Target(_trained(name, folder), lambda path: rank(load(path), kernels()[0]), TENSORS)

    return make


for _model in ("MLP", "EarlyJoinSAGE", "LateJoinResGCN", "TileRanker"):
    TARGETS[f"scorer_{_model}"] = _scored(_model, torch=False)
TARGETS["torch_MLP"] = _scored("MLP", torch=True)
TARGETS["torch_TileRanker"] = _scored("TileRanker", torch=True)
TARGETS["GBDT"] = _scored("GBDT", torch=False)


@target
def training_checkpoint(folder: Path) -> Target:
    from tilewise.costmodel.data.dataset import dataset_from_kernels
    from tilewise.costmodel.training.config import default_settings
    from tilewise.costmodel.training.loop import CHECKPOINT, TrainingRun

    data = dataset_from_kernels(kernels()[:8], kernels()[8:])

    def run() -> TrainingRun:
        return TrainingRun(data, default_settings("MLP", epochs=3), "cpu", folder)

    def use(path: Path) -> None:
        again = run()
        with contextlib.redirect_stderr(io.StringIO()):
            again.resume(progress=False)
        assert 0 <= again.state.epoch <= 3 and len(again.state.curve) == again.state.epoch

    run()._write_checkpoint(folder / CHECKPOINT)
    return Target(folder / CHECKPOINT, use, TENSORS)


@target
def tuning_json(folder: Path) -> Target:
    from tilewise.costmodel.models.files import shipped_file
    from tilewise.store.problem import Config
    from tilewise.tune.choose.scores import file_scores
    from tilewise.tune.families.space import space_of
    from tilewise.tune.search.gaussian_process import GaussianProcess

    for end in (".safetensors", ".tuning.json"):
        (folder / f"cpu{end}").write_bytes(shipped_file("cpu").with_name(f"cpu{end}").read_bytes())
    configs = [Config.of(mr=6, nr=16, mc=60, nc=64 * n, kc=64) for n in range(1, 9)]

    def use(path: Path) -> None:
        hyper = file_scores(folder / "cpu.safetensors").hyper
        process = GaussianProcess(np.linspace(0, 1, len(configs)), space_of(configs).scaled(hyper.ard), hyper)
        process.value_of_information()

    return Target(folder / "cpu.tuning.json", use, (in_json,))


@target
def kernel_npz(folder: Path) -> Target:
    from tilewise.costmodel.data.shards import read_kernel

    return Target(write_npz(kernels()[0], folder), lambda path: read_kernel(path, 24), (in_npz,))


@target
def collection(folder: Path) -> Target:
    from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
    from tilewise.costmodel.data.describe import describe
    from tilewise.costmodel.data.schema import Schema
    from tilewise.costmodel.data.writing import write_collection

    members = [MeasuredKernel(k, np.zeros(12, np.float32), np.ones(12, np.uint16), {"m": 3}) for k in kernels()[:4]]
    write_collection(folder / "c.npz", Collection(Schema(), {"train": members[:2], "valid": members[2:], "test": []}))

    def use(path: Path) -> None:
        read_collection(path)
        describe(path)

    return Target(folder / "c.npz", use, (in_npz,))


@target
def schema(folder: Path) -> Target:
    from tilewise.costmodel.data.schema import read_schema

    (folder / "schema.json").write_text('{"config_features": ["a", "b_0", "c"], "hardware": {"x": [1, 2]}}')
    return Target(folder / "schema.json", lambda path: read_schema(path.parent), (in_json,))


@target
def converted_index(folder: Path) -> Target:
    from tilewise.costmodel.data.schema import Schema
    from tilewise.costmodel.data.shards import open_split

    files = [write_npz(kernel, folder) for kernel in kernels()[:3]]
    open_split(files, Schema(), folder / "cache", "x", progress=False)
    (index,) = (folder / "cache").glob("*/index.json")

    def use(path: Path) -> None:
        for kernel in open_split(files, Schema(), folder / "cache", "x", progress=False):
            kernel.node_feat.sum()

    return Target(index, use, (in_json,))


@target
def predictions(folder: Path) -> Target:
    from tilewise.costmodel.course.predictions import read_predictions, write_kaggle

    rows = "".join(f"tile:xla:{i:032x},{i};{i + 1};3;4;5\n" for i in range(20))
    (folder / "p.csv").write_text("ID,TopConfigs\n" + rows)

    def use(path: Path) -> None:
        read_predictions(path)
        write_kaggle(folder / "kaggle.csv", path, path)

    return Target(folder / "p.csv", use, (in_checked_json,))


@target
def run_file(folder: Path) -> Target:
    from course.flags import read_run

    run = {"args": {"model": "MLP", "model_kwargs_json": "{}", "configs": 10}, "train_curve": {"epoch": [0]}}
    (folder / "run_1.jsonz").write_bytes(gzip.compress(json.dumps(run).encode(), mtime=0))
    return Target(folder / "run_1.jsonz", read_run, (in_gzip(in_json),))


@target
def tuning_data(folder: Path) -> Target:
    from costmodel.hlo.test_featurize import tuning_data as made

    from tilewise.costmodel.hlo.tuning_data import read_tuning_data

    (folder / "prog.pb").write_bytes(made().SerializeToString())
    return Target(folder / "prog.pb", read_tuning_data)


@target
def archive(folder: Path) -> Target:
    from tilewise.costmodel.course.download import unpack_tar

    file = write_npz(kernels()[0], folder)
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(file, "npz/tile/xla/train/k_1.npz")
    return Target(folder / "a.tar", lambda path: unpack_tar(path, folder / "data"))


def _imported(kind: str, log_name: str, inside: Damage) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        from costmodel.data.importers import test_importers

        from tilewise.costmodel.data.importers import import_logs

        (folder / "log.json").write_text(getattr(test_importers, log_name)())

        def use(path: Path) -> None:
            shutil.rmtree(folder / "out", ignore_errors=True)
            import_logs(kind, [path], folder / "out")

        return Target(folder / "log.json", use, (inside,))

    return make


TARGETS["log_kernel_tuner"] = _imported("kernel-tuner", "t4", in_json)
TARGETS["log_kernel_tuner_cache"] = _imported("kernel-tuner", "cache", in_json)
TARGETS["log_autotvm"] = _imported("autotvm", "autotvm", in_lines)
TARGETS["log_metaschedule"] = _imported("metaschedule", "metaschedule", in_lines)


@target
def blended_model(folder: Path) -> Target:
    from tilewise.costmodel import load_scorer, rank
    from tilewise.costmodel.models.blend import blend

    parts = [load_scorer(_trained(name, folder / name)) for name in ("MLP", "GBDT")]
    blend(parts, kernels()).save(folder / "blend.safetensors")
    return Target(folder / "blend.safetensors", lambda path: rank(load_scorer(path), kernels()[0]), TENSORS)


@target
def board_of_models(folder: Path) -> Target:
    from tilewise.costmodel.board import board_lines, read_board

    interval = {"mean": 0.1, "low": 0.05, "high": 0.2}
    row = {"collection": "h200", "model": "MLP", "split": "test", "kernels": 3, "seed": 0, "key": "k"}
    (folder / "board.json").write_text(json.dumps({"board": [row | {"metrics": {"top1": interval, "top5": interval}}]}))
    return Target(folder / "board.json", lambda path: board_lines(read_board(path)), (in_json,))


TARGETS["log_triton"] = _imported("triton", "triton", in_json)


# --- data ---


@target
def idx(folder: Path) -> Target:
    from tilewise.data import mnist

    for kind, count in (("train", 6), ("t10k", 4)):
        images = struct.pack(">4I", 0x803, count, 8, 8) + bytes(count * 64)
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + bytes(count))
    return Target(folder / "train-images-idx3-ubyte", lambda path: mnist(folder))


@target
def idx_gzip(folder: Path) -> Target:
    paths = idx(folder)
    packed = paths.place.with_name(paths.place.name + ".gz")
    packed.write_bytes(gzip.compress(paths.place.read_bytes(), mtime=0))
    paths.place.unlink()
    from fuzz.damage import in_bytes

    return Target(packed, paths.use, (in_gzip(in_bytes),))


@target
def text(folder: Path) -> Target:
    from tilewise import data
    from tilewise.fit.tasks import read_text

    (folder / "t.txt").write_text("a text of one’s own\n" * 20)
    return Target(folder / "t.txt", lambda path: data.text(read_text(str(path))))


@target
def settings(folder: Path) -> Target:
    from tilewise.cli.app import read_configuration

    (folder / "tilewise.toml").write_text('threads = 2\ncache = "x"\nboard = "b.db"\n')
    return Target(folder / "tilewise.toml", read_configuration)


# --- tuning ---


@target
def shapes(folder: Path) -> Target:
    from tilewise.store.problem import read_shapes
    from tilewise.tune.families.cpu.family import get_family

    spec = [{"family": "matmul", "m": 64, "n": 32, "k": 16, "program": "own"}]
    (folder / "s.json").write_text(json.dumps(spec))

    def use(path: Path) -> None:
        for kernel in read_shapes(path, lambda family, fields: get_family(family).problem(fields)):
            assert kernel.name

    return Target(folder / "s.json", use, (in_json,))


def _store(folder: Path) -> Path:
    from tilewise.gpu.families.family import get_family
    from tilewise.store.problem import Kernel, Problem
    from tilewise.store.store import Machine, Store, Verdict

    with Store(folder / "s.sqlite") as store:
        for m in (32, 64):
            problem = Problem.of("matmul", dtype="bf16", m=m, n=32, k=16, epilogue="none", layout="nn")
            kernel, choices = Kernel("gpt2_bf16_b1", problem), list(get_family("matmul").configs(problem)[:4])
            run = store.begin(Machine("triton", "Test GPU", {"name": "Test GPU", "triton": "3"}), 0, {"rounds": 3})
            assert store.claim(run, kernel)
            store.add_verdicts(run, kernel, [Verdict(c, "ok") for c in choices])
            for turn in range(3):
                store.add_batch(run, kernel, turn, 100.0 + turn, [(c, 90.0 + turn) for c in choices[1:]])
            store.finish(run, kernel, choices[0], 1.0)
        store.snapshot(folder / "copy.sqlite")
    for path in folder.glob("s.sqlite*"):
        path.unlink()
    return folder / "copy.sqlite"


def _use_store(store_file: Path, folder: Path) -> None:
    from tilewise.store.aggregate import open_measurements
    from tilewise.tune.measure.export import export_folder, make_collection

    with open_measurements(store_file) as store:
        store.runs()
        export_folder(make_collection(store, "own"), folder / "export")


@target
def store(folder: Path) -> Target:
    place = _store(folder)

    def use(path: Path) -> None:
        for end in ("-wal", "-shm", "-journal"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        _use_store(path, folder)

    return Target(place, use, (in_store,))


@target
def gzip_store(folder: Path) -> Target:
    part = folder / "visit" / "store.sqlite.gz.00"
    part.parent.mkdir()
    part.write_bytes(gzip.compress(_store(folder).read_bytes(), mtime=0))
    return Target(part, lambda path: _use_store(path.parent, folder), (in_gzip(in_store),))


@target
def choices(folder: Path) -> Target:
    from tilewise.store.problem import Config, Problem
    from tilewise.tune.choose.cache import ChoiceFile, Decision

    choice_file = ChoiceFile(folder, "here")
    for m in (32, 64):
        choice_file.put(
            Decision(Problem.of("matmul", m=m, n=2, k=3), Config.of(mr=6, nr=16), "measured", 10.0, None, 3, True)
        )

    def use(path: Path) -> None:
        for choice in ChoiceFile(folder, "here").all():
            assert choice.problem.family and choice.config.key and choice.runtime_ns > 0

    return Target(folder / "choices.jsonl", use, (in_lines,))


@target
def machine_json(folder: Path) -> Target:
    from tilewise.profile import machine as module

    os.environ["TILEWISE_CACHE"] = str(folder)
    arrays = {
        "cpu": "A CPU", "cpus": 2, "method": "x",
        "peaks": [{"isa": "avx2", "threads": 1, "flops_per_second": 1e11}],
        "bandwidths": [{"bytes": 1 << 20, "threads": 1, "read": 1e10, "copy": 1e10}],
        "caches": [{"level": 1, "bytes": 32768, "shared_by": 1}],
        "fresh_memory": 1e9,
    }  # fmt: skip
    (folder / "machine.json").write_text(json.dumps({"identity": module._identity(), "machine": arrays}))

    def use(path: Path) -> None:
        figures = module.cached_machine()
        if figures is not None:
            assert figures.peak() > 0 and figures.bandwidth(1e6) > 0

    return Target(folder / "machine.json", use, (in_json,))


# --- the competition ---


@target
def recipe(folder: Path) -> Target:
    (folder / "r.json").write_text(boards.RECIPE)
    return Target(folder / "r.json", boards.use_recipe, (in_json,))


@target
def leaderboard(folder: Path) -> Target:
    return Target(boards.made_leaderboard(folder), boards.use_leaderboard, (in_lines,))


@target
def roster(folder: Path) -> Target:
    (folder / "class.csv").write_text(boards.ROSTER)
    return Target(folder / "class.csv", boards.use_roster)


@target
def board_backup(folder: Path) -> Target:
    boards.made_board(folder)
    return Target(folder / "backup.jsonl", boards.use_backup(folder), (in_lines,))


@target
def board(folder: Path) -> Target:
    return Target(boards.made_board(folder), boards.use_board, (in_store,))
