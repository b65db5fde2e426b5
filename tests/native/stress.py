"""`make stress`: many Python threads in the kernels at once, for MINUTES; every result is that of a thread alone.

    python tests/native/stress.py --minutes 10 --threads 8 --seed 0

Each thread draws jobs: products, convolutions, training steps, plans, quantized and four-bit networks, generation,
ranking, files, choices on the disk. Models and inputs are shared between the threads, and the number of the kernels'
own threads changes while they run. Every job's result was computed alone before: equal means bit for bit. Training has
a result for each number of the kernels' threads, since the gradient of a convolution's filters is summed in that many
parts; all others have one.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import Tensor, models, nn, no_grad
from tilewise._extension import native
from tilewise.backend import matmul_native
from tilewise.costmodel import load_dataset, load_scorer, rank
from tilewise.costmodel.models.files import shipped_file
from tilewise.generate import generate
from tilewise.plan import compile as compile_plan
from tilewise.quantize import quantize
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision

Job = Callable[[], Any]
KERNEL_THREADS = (1, 2, 3, 4)
SHAPES = ((1, 768, 768), (3, 130, 300), (7, 64, 1000), (16, 512, 64), (33, 65, 129), (96, 96, 96), (200, 300, 100))


def rand(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def evaluated(model: Any, x: np.ndarray) -> Job:
    def job() -> np.ndarray:
        with no_grad():
            return np.asarray(model(Tensor(x)).data)

    return job


def products(rng: np.random.Generator) -> dict[str, Job]:
    jobs_by_name: dict[str, Job] = {}
    for m, n, k in SHAPES:
        a, b, bt = rand(rng, m, k), rand(rng, k, n), rand(rng, n, k).T
        jobs_by_name[f"product {m}x{n}x{k}"] = lambda a=a, b=b: matmul_native(a, b)
        jobs_by_name[f"product {m}x{n}x{k}, transposed"] = lambda a=a, b=bt: matmul_native(a, b)
    return jobs_by_name


def training_step(seed: int) -> Job:
    def job() -> np.ndarray:
        rng = np.random.default_rng(seed)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1, rng=rng), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10, rng=rng)
        )
        loss = nn.functional.cross_entropy(net(Tensor(rand(rng, 6, 1, 8, 8))), np.arange(6))
        loss.backward()
        return np.concatenate([np.ravel(p.grad) for p in net.parameters()])

    return job


def networks(rng: np.random.Generator) -> dict[str, Job]:
    images, rows = rand(rng, 5, 1, 8, 8), rand(rng, 9, 64)
    cnn, mlp, gpt = models.pretrained("cnn").eval(), models.pretrained("mlp").eval(), nn.GPT(2, 64, 2, 50, 64)
    prompt = [int(i) for i in rng.integers(0, 50, 12)]
    plan = compile_plan(cnn, images)
    return {
        "cnn": evaluated(cnn, images),
        "plan": lambda: np.asarray(plan(images)),
        "int8 cnn": evaluated(quantize(cnn, [images]), images),
        "int8 mlp": evaluated(quantize(mlp, [rows]), rows),
        "four bits": evaluated(quantize(mlp, [rows], bits=4), rows),
        "generate": lambda: np.array(list(generate(gpt, prompt, 8))),
        "generate int8": lambda: np.array(list(generate(gpt, prompt, 8, weights="int8"))),
        "training step": training_step(3),
    }


def on_disk(rng: np.random.Generator, folder: Path) -> dict[str, Job]:
    array = rand(rng, 40, 30)
    problems = [Problem.of("matmul", m=m, n=2, k=3) for m in range(8)]
    tiles = [Config.of(mr=6, nr=16, kc=8 * m + 8) for m in range(8)]

    def saved() -> np.ndarray:
        path = folder / f"{threading.get_ident()}.safetensors"
        tw.save({"a": array}, path)
        return np.asarray(tw.load(path)["a"])

    def cached_result() -> np.ndarray:
        at = threading.get_ident() % 8
        choices = ChoiceFile(folder, "here")
        choices.put(Decision(problems[at], tiles[at], "measured", 10.0, None, 3, True))
        choice = choices.get(problems[at])
        assert choice is not None and choice.config == tiles[at]
        return np.zeros(1)

    scorer = load_scorer(shipped_file("cpu"))
    kernel = load_dataset("cpu").test[0]
    return {"file": saved, "choices": cached_result, "rank": lambda: rank(scorer, kernel).scores}


class Stress:
    """The jobs, what each gives alone, and what came of them together."""

    def __init__(self, jobs: Mapping[str, Job], seed: int) -> None:
        self.jobs, self.seed = jobs, seed
        self.expected = {name: self._alone(name) for name in jobs}
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock, self.until = threading.Lock(), 0.0

    def _alone(self, name: str) -> list[Any]:
        results = []
        for threads in KERNEL_THREADS:
            tw.set_num_threads(threads)
            results.append(self.jobs[name]())
        alike = all(np.array_equal(results[0], other) for other in results)
        assert alike or name == "training step", f"{name}: the number of threads changes its result"
        return results

    def work(self, number: int) -> None:
        rng, names = np.random.default_rng([self.seed, number]), sorted(self.jobs)
        while time.monotonic() < self.until and not self.wrong:
            name = names[int(rng.integers(len(names)))]
            if rng.random() < 0.02:
                tw.set_num_threads(int(rng.choice(KERNEL_THREADS)))
            try:
                result = self.jobs[name]()
                is_expected = any(np.array_equal(result, one) for one in self.expected[name])
                trouble = "" if is_expected else "another result"
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
            with self._lock:
                self.done[name] += 1
                if trouble:
                    self.wrong.append(f"{name}: {trouble}")

    def run(self, minutes: float, threads: int) -> None:
        self.until = time.monotonic() + 60 * minutes
        workers = [threading.Thread(target=self.work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    sys.setswitchinterval(1e-4)  # threads change places often
    if native is None:
        sys.exit("the compiled kernels are not installed")
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        stress = Stress(products(rng) | networks(rng) | on_disk(rng, Path(folder)), options.seed)
        stress.run(options.minutes, options.threads)
    for name, count in sorted(stress.done.items()):
        print(f"{count:9,} {name}")
    print(f"{stress.done.total():,} jobs on {options.threads} threads in {options.minutes:g} minutes")
    for line in stress.wrong[:20]:
        print(f"WRONG: {line}")
    return 1 if stress.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
