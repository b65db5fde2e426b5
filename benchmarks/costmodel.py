"""Times EarlyJoinSAGE at the course's defaults against the TensorFlow original, in training and prediction, and
TileRanker's NumPy scorer against the PyTorch model it was exported from.

    python -m benchmarks.costmodel --threads 1     # and 2; needs the Keras environment (`make keras-env`)

The collection is generated: kernels of 40 nodes, all 140 + 24 features varying, batches of 10 kernels x 10
configurations. A training step of ours is everything from drawing to the optimizer; the original's batches are ready.
The original runs in a fresh process and takes turns with ours; the one whose turn it is not waits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, compare, read_rows, write_results
from tilewise.costmodel import Dataset, load_dataset, load_scorer, train
from tilewise.costmodel.data.kernel import Kernel

RESULTS = Path(__file__).parent / "results" / "costmodel.json"
NODES, KERNELS, CONFIGS, MANY = 40, 100, 60, 1000
BASELINES = ("MLP", "LateJoinSAGE", "EarlyJoinSAGE", "LateJoinResGCN", "EarlyJoinResGCN")


def write_kernel(path: Path, rng: np.random.Generator, configs: int) -> None:
    nodes = np.arange(1, NODES)
    edges = [np.stack([nodes, rng.integers(0, nodes)], axis=1) for _ in range(2)]
    np.savez(
        path,
        node_feat=(100 * rng.random((NODES, 140))).astype(np.float32),
        node_opcode=rng.integers(1, 96, NODES).astype(np.uint8),
        edge_index=np.concatenate(edges)[: NODES * 3 // 2],
        config_feat=rng.integers(1, 200, (configs, 24)).astype(np.float32),
        config_runtime=rng.integers(1000, 9000, configs),
        config_runtime_normalizers=np.full(configs, 3000),
    )


def write_collection(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, kernels, configs in (("train", KERNELS, CONFIGS), ("valid", 10, CONFIGS), ("test", 1, MANY)):
        (folder / split).mkdir()
        for number in range(kernels):
            write_kernel(folder / split / f"net{number % 7}_{number:04d}.npz", rng, configs)


class Original:
    """The TensorFlow process."""

    def __init__(self, folder: Path, threads: int, model: str) -> None:
        root = Path(__file__).parent.parent
        default = root / ".venv-keras" / "bin" / "python"
        python = os.environ.get("TILEWISE_KERAS_PYTHON", str(default))
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        environment = os.environ | quiet | {"PYTHONPATH": str(root / "src")}
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(Path(__file__).with_name("costmodel_peer.py")), folder, str(threads), model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        if self._answer() != "ready":
            sys.exit("The TensorFlow process did not start; build its environment with `make keras-env`.")

    def seconds(self, what: str, count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        return float(self._answer()) / count

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def in_turns(name: str, threads: int, ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Row:
    times: dict[str, list[float]] = {"tensorflow": [], "tilewise": []}
    for _ in range(rounds):
        for who, run in (("tensorflow", theirs), ("tilewise", ours)):
            time.sleep(0.05)  # idle threads go to sleep
            times[who].append(run())
    seconds = {who: statistics.median(values) for who, values in times.items()}
    row = Row(name, threads, seconds, seconds["tensorflow"] / seconds["tilewise"])
    print(row, flush=True)
    return row


def one_pass(run: Any) -> float:
    """Seconds a step of one pass over the train split."""
    started = time.perf_counter()
    run._epoch(0)
    return (time.perf_counter() - started) / -(-KERNELS // run.settings.batch)


def one_prediction(model: Any, kernel: Kernel) -> float:
    started = time.perf_counter()
    model.score(kernel)
    return time.perf_counter() - started


def beside_the_original(folder: Path, data: Dataset, model: str, threads: int, rounds: int) -> list[Row]:
    from tilewise.costmodel.training.config import default_settings
    from tilewise.costmodel.training.loop import TrainingRun

    original = Original(folder, threads, model)
    try:
        run = TrainingRun(data, default_settings(model), "cpu", None)
        one_pass(run)
        steps = -(-KERNELS // run.settings.batch)
        name = f"{model}, training, a step of 10 × 10 configurations"
        rows = [in_turns(name, threads, lambda: one_pass(run), lambda: original.seconds("train", steps), rounds)]
        trained, kernel = run.finish(), data.test[0]
        name = f"{model}, predicting {MANY:,} configurations"
        ours = lambda: one_prediction(trained, kernel)  # noqa: E731
        ours()
        return [*rows, in_turns(name, threads, ours, lambda: original.seconds("predict", 1), rounds)]
    finally:
        original.close()


def scorer_row(folder: Path, data: Dataset, threads: int) -> Row:
    """TileRanker with its defaults; the features of the kernel are recomputed every time."""
    train(data, "TileRanker", out_dir=folder / "ranker", epochs=1, progress=False, device="cpu")
    from tilewise.costmodel import load_model

    scorer, model, kernel = load_scorer(folder / "ranker"), load_model(folder / "ranker"), data.test[0]

    name = f"TileRanker, NumPy scorer, {MANY:,} configurations of {NODES} nodes"
    return compare(name, threads, {"tilewise": lambda: scorer.score(kernel), "torch": lambda: model.score(kernel)})


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--models", default="EarlyJoinSAGE")
    options = flags.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    os.environ.setdefault("TILEWISE_CACHE", tempfile.mkdtemp(prefix="tilewise-costmodel-"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_collection(folder)
        data = load_dataset(folder, progress=False)
        rows = [scorer_row(folder, data, options.threads)]
        for model in options.models.split(","):
            rows += beside_the_original(folder, data, model, options.threads, options.rounds)
    done = {(row.name, row.threads) for row in rows}
    old_rows = [row for row in read_rows(RESULTS) if (row.name, row.threads) not in done]
    write_results(RESULTS, sorted([*old_rows, *rows], key=lambda row: (row.name, row.threads)))


if __name__ == "__main__":
    main()
