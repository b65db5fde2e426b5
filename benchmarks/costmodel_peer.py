"""The TensorFlow side of `benchmarks.costmodel`: a baseline as published, run by the Keras environment's Python.

    python benchmarks/costmodel_peer.py FOLDER THREADS MODEL

Reads the same collection and, for every line on its standard input, does that much work and answers with seconds:
``train STEPS`` or ``predict TIMES``. Training is the class of course/models.py in one compiled step (forward, loss,
gradients, clipping, Adam) on batches that were drawn beforehand; prediction is its `forward`, called as the course's
script and grader call it, in float32 and on a graph made beforehand. What the original does besides does not count.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

COURSE = Path(__file__).resolve().parent.parent / "course"


class Peer:
    """The published model and what it works on."""

    def __init__(self, folder: str, threads: int, model: str) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        sys.path.insert(0, str(COURSE))
        import numpy as np
        from flags import TrainArgs
        from keras_graphs import graph_of
        from keras_training import Trainer

        from tilewise.costmodel import load_dataset

        data = load_dataset(folder, progress=False)
        args = TrainArgs(
            100, 5, 10, 10, 20, "ListMLELoss:1,MSE:0.02", 1e-3, 1e-3, model, "{}", "predictions", folder, "", -1, ""
        )
        self.trainer = Trainer(args, data, 0)
        rng = np.random.default_rng(0)
        batches = list(self.trainer._batches(data.train, rng, True, -1))
        self.batches = [(graph, tf.constant(target)) for graph, target in batches]
        kernel = data.test[0]
        built, count = self.trainer.model, kernel.n_configs
        self.graph = graph_of(kernel, self.trainer.scaling)
        built.__class__.precise = False  # tilewise's own addition; the original ranks in float32
        self.forward = lambda graph: built.forward(graph, count)
        self.forward(self.graph)
        self.train(len(self.batches))

    def train(self, steps: int) -> None:
        result: Any = None
        for step in range(steps):
            result = self.trainer._train(*self.batches[step % len(self.batches)])
        result[1].numpy()

    def predict(self, times: int) -> None:
        for _ in range(times):
            self.forward(self.graph).numpy()


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        started = time.perf_counter()
        (peer.train if what == "train" else peer.predict)(int(count))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
