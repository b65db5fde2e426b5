"""Readers that came later: GGUF models, more logs of autotuners, layouts, a teacher's images, an input of `run`."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.damage import Rng, in_checked_json, in_lines, in_npz
from fuzz.targets import TARGETS, TENSORS, Target, _imported, target


def _samples() -> Any:
    """The tests' own writers of GGUF files; `gguf` itself is the package that they use."""
    folder = str(Path(__file__).parents[1] / "gguf")
    if folder not in sys.path:
        sys.path.append(folder)
    import test_hostile

    return test_hostile


def _gguf(which: str, folder: Path) -> Target:
    samples = _samples()
    samples.write_sample(which, folder / "x.gguf")
    header = (folder / "x.gguf").read_bytes().index(b"output_norm.weight") + 200

    def inside(content: bytes, rng: Rng) -> bytes:
        return bytes(samples.mutated(content, header, rng))

    return Target(folder / "x.gguf", samples.use, (inside,))


for _which in ("gpt2", "llama", "blocks", "floats", "gemma2", "qwen3", "phi3"):  # the names in test_hostile.SAMPLES
    TARGETS[f"gguf_{_which}"] = functools.partial(_gguf, _which)
TARGETS["log_inductor"] = _imported("inductor", "autoheuristic", in_checked_json)
TARGETS["log_inductor_feedback"] = _imported("inductor", "feedback", in_lines)
TARGETS["log_helion"] = _imported("helion", "helion", in_checked_json)


@target
def log_helion_runs(folder: Path) -> Target:
    """What Helion writes beside its log."""
    from costmodel.data.importers import test_importers

    from tilewise.costmodel.data.importers import import_logs

    (folder / "log.csv").write_text(test_importers.helion())
    configs = {f"c{number}": {"block_sizes": [16 << number, 32], "num_warps": 4} for number in range(3)}
    run = {"run_id": "r1", "kernel": "add", "input_shapes": "[(64, 32)]", "hardware": "a GPU", "configs": configs}
    (folder / "log.meta.jsonl").write_text(json.dumps(run) + "\n")

    def use(path: Path) -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        import_logs("helion", [folder / "log.csv"], folder / "out")

    return Target(folder / "log.meta.jsonl", use, (in_lines,))


@target
def recipe_file(folder: Path) -> Target:
    """Weights that a recipe brings along."""
    from tilewise import models, save
    from tilewise.bench import read_recipe
    from tilewise.bench.build import build

    save(models.pretrained("mlp"), folder / "w.safetensors")
    steps = [{"step": "weights", "file": "w.safetensors"}]
    (folder / "r.json").write_text(json.dumps({"tilewise": 1, "event": "MLP_SPRINT", "name": "mine", "steps": steps}))

    def use(path: Path) -> None:
        recipe = read_recipe(folder / "r.json")
        recipe.digest()
        build(recipe)

    return Target(folder / "w.safetensors", use, TENSORS)


@target
def teacher_images(folder: Path) -> Target:
    from tilewise.bench import TinyMLPerf
    from tilewise.bench.validation import read_images

    np.savez(folder / "x.npz", x=np.zeros((3, 8, 8), np.float32), y=np.arange(3))
    return Target(folder / "x.npz", lambda path: read_images(path, TinyMLPerf.MLP_SPRINT), (in_npz,))


@target
def network_input(folder: Path) -> Target:
    from tilewise.cli.optimize.own_network import input_arrays

    np.save(folder / "x.npy", np.zeros((2, 3), np.float32))
    network: Any = SimpleNamespace(inputs=[SimpleNamespace(name="x")], title="a network")
    return Target(folder / "x.npy", lambda path: input_arrays(network, [str(path)])["x"].sum())


def _layout_file(folder: Path) -> Path:
    from tilewise.costmodel.layout import synthetic_graph, write_graph

    write_graph(folder / "g.npz", synthetic_graph("g", 0, source="xla", search="random", nodes=20, configs=6))
    return folder / "g.npz"


def _use_layouts(path: Path, folder: Path) -> None:
    from tilewise.costmodel.layout import open_graph

    graph = open_graph(path, folder / "cache")
    assert graph.config_feat[[0, graph.n_configs - 1]].shape[1:] == (len(graph.config_ids), 18)
    assert graph.node_feat[graph.config_ids].shape[1] == 140


@target
def layout_graph(folder: Path) -> Target:
    return Target(_layout_file(folder), lambda path: _use_layouts(path, folder), (in_npz,))


@target
def torch_layout_model(folder: Path) -> Target:
    from tilewise.costmodel.layout import TrainedLayoutModel, load_layout_model, synthetic_graph
    from tilewise.costmodel.layout.segments import Scaling
    from tilewise.costmodel.layout.trained import build_layout_model

    graph = synthetic_graph("g", 0, source="nlp", search="random", nodes=20, configs=5)
    scaling = Scaling.fit([graph])
    module, kwargs = build_layout_model("LayoutMPNN", scaling.width, {"hidden": 8, "layers": 1, "op_embed": 4})
    record = {"model": "LayoutMPNN", "model_kwargs": kwargs, "hops": 2, "segment_nodes": 10}
    TrainedLayoutModel(module, scaling, record).save(folder / "m.safetensors")
    return Target(folder / "m.safetensors", lambda path: load_layout_model(path).score(graph), TENSORS)


@target
def lock_file(folder: Path) -> Target:
    from tilewise.gpu.pinning.lock import read_lock

    lines = ["format = 1", "[[choice]]", 'kernel = "matmul"', 'device = "NVIDIA H200"', 'model = "m"', 'reason = "r"']
    lines += ["predicted = 1.5", "problem = { family = 'matmul', m = 512 }", "config = { block = 64 }"]
    (folder / "tilewise.lock").write_text("\n".join(lines) + "\n")
    return Target(folder / "tilewise.lock", read_lock)
