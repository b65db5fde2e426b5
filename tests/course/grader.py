"""The steps of the course's grader, written down anew from its description, to be run on a folder that was handed in.

Reads the npz files by itself, scales by the train files, builds the graphs, takes the model up as the grader does, and
gives the scores of every kernel. Nothing of tilewise is imported: this is the other side of the fence.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn


def grade(handed_in: Path, model_name: str, data_root: Path, split: str) -> dict[str, np.ndarray]:
    """Kernel id to the scores that the model in ``handed_in/model_name`` gives its configurations."""
    models = _import(handed_in / "models.py")
    files = {name: _read(data_root / name) for name in ("train", "valid", "test")}
    num_ops = 1 + max(int(kernel["node_opcode"].max()) for part in files.values() for kernel in part.values())
    scale_node = _scaler([kernel["node_feat"] for kernel in files["train"].values()])
    scale_config = _scaler([kernel["config_feat"] for kernel in files["train"].values()])
    graphs = {name: _graph(name, kernel, scale_node, scale_config) for name, kernel in files[split].items()}

    with tf.keras.saving.custom_object_scope({"CombinedLoss": tf.keras.losses.MeanSquaredError}):
        saved = tf.keras.models.load_model(handed_in / model_name)
    run_file = handed_in / (model_name.replace("model_", "run_") + ".jsonz")
    args = json.loads(gzip.decompress(run_file.read_bytes()))["args"]
    model = getattr(models, args["model"])(
        num_configs=args["configs"], num_ops=num_ops, **json.loads(args["model_kwargs_json"])
    )
    sample = next(iter(graphs.values()))
    model.forward(sample, int(sample.node_sets["config"].sizes[0]))
    assert len(model.trainable_variables) == len(saved.trainable_variables)
    for target, source in zip(model.trainable_variables, saved.trainable_variables, strict=True):
        assert target.shape == source.shape
        target.assign(source)

    scores = {}
    for name, graph in graphs.items():
        num_configs = int(graph.node_sets["config"].sizes[0])
        predictions = model.forward(graph, num_configs)
        assert predictions.shape == (1, num_configs)
        scores[name] = tf.squeeze(predictions, 0).numpy()
        top = tf.argsort(tf.squeeze(predictions, 0)).numpy()
        assert (np.sort(scores[name]) == scores[name][top]).all()
    return scores


def order(scores: np.ndarray) -> np.ndarray:
    """As the grader sorts."""
    return tf.argsort(scores).numpy()


def _import(path: Path):
    spec = importlib.util.spec_from_file_location("handed_in_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    kernels = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            kernels[path.stem] = {key: arrays[key] for key in arrays.files}
    return kernels


def _scaler(matrices: list[np.ndarray]):
    everything = tf.concat(matrices, axis=0)
    low, high = tf.reduce_min(everything, 0, keepdims=True), tf.reduce_max(everything, 0, keepdims=True)
    used = low[0] != high[0]

    def scale(matrix: np.ndarray) -> tf.Tensor:
        columns = [tf.boolean_mask(part, used, axis=1) for part in (matrix, low, high)]
        return (columns[0] - columns[1]) / (columns[2] - columns[1])

    return scale


def _graph(name: str, kernel: dict[str, np.ndarray], scale_node, scale_config) -> tfgnn.GraphTensor:
    nodes, edges, configs = len(kernel["node_opcode"]), kernel["edge_index"], len(kernel["config_feat"])
    runtimes = tf.constant(kernel["config_runtime"]) / tf.constant(kernel["config_runtime_normalizers"])
    return tfgnn.GraphTensor.from_pieces(
        node_sets={
            "op": tfgnn.NodeSet.from_fields(
                sizes=tf.constant([nodes]),
                features={"op": tf.constant(kernel["node_opcode"]), "feats": scale_node(kernel["node_feat"])},
            ),
            "config": tfgnn.NodeSet.from_fields(
                sizes=tf.constant([configs]),
                features={
                    "feats": scale_config(kernel["config_feat"]),
                    "runtimes": runtimes,
                    "normalizers": tf.constant(kernel["config_runtime_normalizers"]),
                },
            ),
            "g": tfgnn.NodeSet.from_fields(sizes=tf.constant([1]), features={"tile_id": tf.constant([name])}),
        },
        edge_sets={
            "feed": _edges(len(edges), ("op", edges[:, 0]), ("op", edges[:, 1])),
            "g_op": _edges(nodes, ("g", np.zeros(nodes, np.int32)), ("op", np.arange(nodes, dtype=np.int32))),
            "g_config": _edges(
                configs, ("g", np.zeros(configs, np.int32)), ("config", np.arange(configs, dtype=np.int32))
            ),
        },
    )


def _edges(count: int, source: tuple[str, np.ndarray], target: tuple[str, np.ndarray]) -> tfgnn.EdgeSet:
    ends = [(name, tf.constant(index)) for name, index in (source, target)]
    return tfgnn.EdgeSet.from_fields(
        sizes=tf.constant([count]), adjacency=tfgnn.Adjacency.from_indices(source=ends[0], target=ends[1])
    )
