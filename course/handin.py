"""Makes the folder to hand in from a trained run: ``models.py``, ``model_<hash>/`` and ``run_<hash>.jsonz``.

A run trained with PyTorch has its weights moved into the Keras class of the same name; the layers are defined alike,
so nothing is retrained or approximated. A run trained with Keras is copied. Needs the Keras environment:
``make handin MODEL=<run>``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import _start
import numpy as np
from flags import DATA_ROOT, OUT_DIR, find_model_dir, has_files, read_run, run_file_of, write_run
from keras_env import hand_over, has_tensorflow, quiet_tensorflow

from tilewise.costmodel.data import tpu_tiles
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.features.scaling import MinMax
from tilewise.costmodel.models.files import MODEL_FILE, ModelFile, read_model_file
from tilewise.errors import ConfigurationError, FileFormatError

# The layers of all models in the order in which the Keras classes create them.
_GROUPS = (
    "embedding", "node_in", "prenet", "gnn", "kernel_in", "config_in", "scaling", "film", "blocks",
    "query", "key", "value", "head", "out", "linear",
)  # fmt: skip
_NO_RANGES = (
    "There is no dataset at {}. A TileRanker trained on other data, such as the toy data, will only guess at the "
    "grader's kernels: their columns differ, and the grader scales them by ranges that are not known here."
)


def make_handin(model_dir: Path, out: Path, scaled_by: MinMax | None = None) -> Path:
    """Write the hand-in of the run in `model_dir` under `out`; the folder of the Keras model is returned.

    `scaled_by` has the ranges by which the grader scales its kernels, where they are not those of the run's own data.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "models.py").write_text(standalone_models(), encoding="utf-8")
    run = read_run(run_file_of(model_dir))
    target = out / model_dir.name
    if (model_dir / MODEL_FILE).is_file():
        run["args"] |= _convert(read_model_file(model_dir), run["args"], target, scaled_by)
    else:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model_dir, target)
    write_run(run_file_of(target), run)
    return target


def standalone_models() -> str:
    """Return models.py with a copy of tilewise's reading of TPU tiles, so that it needs TensorFlow and NumPy only."""
    models = Path(__file__).with_name("models.py").read_text(encoding="utf-8")
    source = Path(tpu_tiles.__file__).read_text(encoding="utf-8").replace("from __future__ import annotations\n", "")
    names = "read_tiles", "tile_features", "tile_kernel_features"
    namespace = ", ".join(f"{name}={name}" for name in names)
    return f"{models}\n\n{source}\n\nimport types\n\ntpu_tiles = types.SimpleNamespace({namespace})\n"


def _convert(file: ModelFile, args: dict[str, Any], target: Path, scaled_by: MinMax | None) -> dict[str, Any]:
    """Save the Keras twin of a PyTorch model; the arguments that differ from the run's are returned."""
    from keras_runs import build, load_models, save_model

    name = str(file.record["model"])
    kwargs, scaling = keras_arguments(file, scaled_by)
    models = load_models()
    if not hasattr(models, name):
        raise ConfigurationError(
            f"{name} has no class in models.py; only the baselines and TileRanker can be handed in."
        )
    model = build(models, name, int(args["configs"]), kwargs)
    graph = _example_graph(scaling)
    model.forward(graph, 2)
    copy_weights(model, file.weights)
    save_model(model, target, scaling, graph)
    return {"model": name, "model_kwargs_json": json.dumps(kwargs)}


def keras_arguments(file: ModelFile, scaled_by: MinMax | None = None) -> tuple[dict[str, Any], MinMax]:
    """The keyword arguments of the Keras class, and the min-max scaling of the features it will be given.

    TileRanker has features of its own: their tables become an argument, and the ranges of the raw columns, which undo
    the grader's scaling, are among them.
    """
    kwargs, preparation = dict(file.record.get("model_kwargs") or {}), file.preparation
    if isinstance(preparation, MinMax):
        return kwargs, preparation
    arrays = dict(preparation.tensors())
    scaling = scaled_by or MinMax.restore(arrays)
    constant = np.flatnonzero(arrays["node_low"] == arrays["node_high"])
    arrays["node_constant"] = np.stack([constant, arrays["node_low"][constant]], axis=1)
    arrays |= {"config_rest": arrays["config_low"]} | scaling.tensors()
    tables = {name: array.astype(float).tolist() for name, array in arrays.items()}
    return ranker_sizes(file.weights) | {"features": tables}, scaling


def grader_ranges(data_root: str) -> MinMax | None:
    """Return the ranges of the course's dataset, by which its grader scales, or None if the dataset is not here."""
    root = Path(data_root).expanduser()
    return MinMax.fit(load_dataset(root).train) if has_files(root) else None


def ranker_sizes(weights: dict[str, Any]) -> dict[str, int]:
    """The sizes of a TileRanker, read off its weights, so that no default need agree."""
    try:
        return {
            "hidden_dim": int(weights["config_in.kernel"].shape[1]),
            "node_dim": int(weights["node_in.kernel"].shape[1]),
            "op_embed_dim": int(weights["embedding.table"].shape[1]),
            "num_gnns": sum(name.startswith("gnn.") and name.endswith(".kernel") for name in weights),
            "num_blocks": sum(name.startswith("blocks.") and name.endswith(".kernel") for name in weights),
            "members": int(weights["scaling"].shape[0]),
            "linear": int("linear" in weights),
        }
    except (KeyError, IndexError) as error:
        raise FileFormatError(f"The run's TileRanker lacks {error}; train it again.") from error


def copy_weights(model: Any, weights: dict[str, Any]) -> None:
    """Assign arrays by name to the variables, which the Keras classes create in the order of their layers."""
    names = sorted(weights, key=_order)
    variables = model.trainable_variables
    if [tuple(weights[n].shape) for n in names] != [tuple(v.shape) for v in variables]:
        raise FileFormatError("The weights of the run do not fit the Keras class of the same name.")
    for name, variable in zip(names, variables, strict=True):
        variable.assign(weights[name])


def _order(name: str) -> tuple[Any, ...]:
    """embedding, prenet, gnn, head; layers by number; a layer's kernel before its bias."""
    group, *rest = name.split(".")
    if group not in _GROUPS:
        raise FileFormatError(f"The run holds {name}, which no model that can be handed in has.")
    numbers = [int(part) for part in rest if re.fullmatch(r"\d+", part)]
    return _GROUPS.index(group), *numbers, name.endswith("bias")


def _example_graph(scaling: Any) -> Any:
    """Two connected nodes and two configurations of zeros: enough to give every variable its shape."""
    import numpy as np
    from keras_graphs import graph_of

    from tilewise.costmodel.data.kernel import make_kernel

    width = len(scaling.config_low)
    feats, configs = np.zeros((2, len(scaling.node_low)), np.float32), np.zeros((2, width), np.float32)
    edges, ones = np.array([[1, 0]], np.int64), np.ones(2, np.int64)
    return graph_of(make_kernel("example", feats, np.array([63, 2]), edges, configs, ones, ones), scaling)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("models", nargs="+", help="model folders, their names under the output folder, or hashes")
    flags.add_argument("--out_dir", default=OUT_DIR, help="where runs are looked for by name")
    flags.add_argument(
        "--handin", default=str(Path(__file__).resolve().parent.parent / "handin"), help="folder to write"
    )
    flags.add_argument("--data_root", default=DATA_ROOT, help="the dataset by whose train split the grader scales")
    options = flags.parse_args()
    if not has_tensorflow():
        return hand_over()
    quiet_tensorflow()
    ranges = grader_ranges(options.data_root)
    if ranges is None:
        print(_NO_RANGES.format(options.data_root), file=sys.stderr)
    for text in options.models:
        name = f"model_{text}" if re.fullmatch(r"[0-9a-f]{32}", text) else text
        model_dir = find_model_dir(name.rstrip("/"), options.out_dir)
        target = make_handin(model_dir, Path(options.handin).expanduser(), ranges)
        print(f"{target} is ready to hand in, with {run_file_of(target).name} and models.py beside it.", flush=True)
    return 0


if __name__ == "__main__":
    _start.run(main)
