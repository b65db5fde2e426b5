"""Honest entries, drawn at random by number: recipes of every event and step, sandboxed plugins, tile predictions.

    python -m tests.bench.honest --first 0 --count 200

Every one is scored as on a board, its timings against the floor, and none may be refused. `TILEWISE_ISA` and
`TILEWISE_MACHINE` make this machine another one; what an entry does is drawn from its number alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tilewise
from tilewise import save
from tilewise._extension import native
from tilewise.backend.tiled import tile_space
from tilewise.bench import Rejected, Settings, TinyMLPerf, TooNoisy, parse_recipe
from tilewise.bench.floor import ceilings
from tilewise.bench.scoring import Score, score_recipe
from tilewise.bench.submission import run_isolated
from tilewise.quantize import INT8Quantizer
from tilewise_arena.sandbox import score_plugin

Array = npt.NDArray[Any]
SETTINGS = Settings(sample_seconds=5e-4, runs=12, most_runs=12, widest_interval=1e9, drawn_inputs=256, time_limit=600)
KINDS = {"MLP_SPRINT": 70, "CNN_MARATHON": 45, "TRANSFORMER_DECATHLON": 15, "plugin": 50, "TILE_OLYMPIAD": 20}
# What an entry may prune without falling below the accuracy asked for by its own fault; more needs more retraining.
_GENTLE = {"MLP_SPRINT": (0.3, 0.6), "CNN_MARATHON": (0.3, 0.5)}
_SHORT_TEXT = 8  # tokens; plain tilewise takes seconds for the event's two hundred
_LONG_TEXTS = 2  # plugins, which know nothing of shorter ones, write so many for the clock
_ISOLATED = 0.1  # of the recipes are scored in a process of their own, as a board's worker does


@dataclass(frozen=True)
class HonestEntry:
    """An honest entry: what it is, and how it is scored."""

    number: int
    what: str
    threads: int
    score: Callable[[], Score]


def draw_entry(number: int, folder: Path) -> HonestEntry:
    """The entry with this number; its files go into `folder`."""
    rng = np.random.default_rng([28, number])
    kind = str(rng.choice(list(KINDS), p=np.array(list(KINDS.values())) / sum(KINDS.values())))
    threads = int(rng.choice([1, 1, 2]))
    if kind == "plugin":
        event, name = (str(part) for part in PLUGINS[int(rng.integers(len(PLUGINS)))])
        path = written_plugin(rng, event, name, folder)
        settings = replace(SETTINGS, runs=_LONG_TEXTS) if event == "TRANSFORMER_DECATHLON" else SETTINGS
        return HonestEntry(
            number, f"{event} plugin {name}", threads, lambda: score_plugin(path, event, settings, threads)
        )
    content = tile_entry(rng, folder) if kind == "TILE_OLYMPIAD" else closed_entry(rng, kind, folder)
    recipe = parse_recipe(content, folder)
    steps = ", ".join(str(step) for step in recipe.steps)
    if kind == "TRANSFORMER_DECATHLON":
        recipe = replace(recipe, event=replace(recipe.event, new_tokens=_SHORT_TEXT))
    elif rng.random() < _ISOLATED:
        return HonestEntry(
            number,
            f"{kind} {steps} (isolated)",
            threads,
            lambda: Score.from_dict(run_isolated("score", recipe, SETTINGS, threads)),
        )
    return HonestEntry(number, f"{kind} {steps}", threads, lambda: score_recipe(recipe, SETTINGS))


# --- recipes ---


def closed_entry(rng: np.random.Generator, event: str, folder: Path) -> dict[str, Any]:
    """A recipe of a few steps, each with parameters that do no harm."""
    draw = _text_steps if event == "TRANSFORMER_DECATHLON" else _image_steps
    return {"tilewise": 1, "event": event, "steps": draw(rng, event, folder)}


def _image_steps(rng: np.random.Generator, event: str, folder: Path) -> list[dict[str, Any]]:
    own = bool(rng.random() < 0.3)
    steps: list[dict[str, Any]] = [_own_weights(rng, event, folder)] if own else []
    steps.append({"step": "backend", "name": str(rng.choice(["native", "native", "numpy"]))})
    if event == "MLP_SPRINT" and native is not None and rng.random() < 0.3:
        steps.append({"step": "tile", "matmul": _tiles(rng)})
    low, high = _GENTLE[event]
    if event == "CNN_MARATHON" and not own and rng.random() < 0.25:
        share, epochs = float(rng.uniform(0.05, 0.25)), int(rng.integers(12, 17))
        steps.append({"step": "shrink", "sparsity": share, "epochs": epochs, "seed": int(rng.integers(1000))})
    elif rng.random() < 0.6:
        epochs = 0 if own else int(rng.integers(4, 9))
        sparsity = float(rng.uniform(0.05, low if not epochs else high))
        step = {"step": "prune", "sparsity": sparsity, "epochs": epochs, "seed": int(rng.integers(1000))}
        step |= {"sparse": bool(rng.integers(2)), "scope": str(rng.choice(["global", "layer"]))}
        steps.append(step if epochs else step | {"scope": "global"})  # a share of every layer needs retraining
    if rng.random() < 0.7:
        observer = str(rng.choice(["minmax", "percentile", "mse", "entropy"]))
        steps.append({"step": "quantize", "observer": observer, "samples": int(rng.integers(256, 1437))})
    return steps


def _text_steps(rng: np.random.Generator, event: str, folder: Path) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [{"step": "backend", "name": str(rng.choice(["native", "numpy"]))}]
    if rng.random() < 0.7:
        steps.append({"step": "kv_cache"})
    return steps


def _own_weights(rng: np.random.Generator, event: str, folder: Path) -> dict[str, Any]:
    """The shipped weights, slightly moved, as a little training of one's own would leave them."""
    weights = {name: tensor.data for name, tensor in TinyMLPerf.event(event).model().named_tensors()}
    noisy_weights = {n: w + _noise(rng, w) if w.ndim > 1 else w for n, w in weights.items()}
    dtype = str(rng.choice(["float32", "float16", "int8"]))
    save(_int8(noisy_weights) if dtype == "int8" else _as(noisy_weights, dtype), folder / "w.safetensors")
    return {"step": "weights", "file": "w.safetensors", "dtype": dtype}


def _noise(rng: np.random.Generator, weights: Array) -> Array:
    noise: Array = (0.05 * weights.std() * rng.standard_normal(weights.shape)).astype(weights.dtype)
    return noise


def _as(weights: dict[str, Array], dtype: str) -> dict[str, Array]:
    return {n: w.astype(dtype) if w.ndim > 1 else w for n, w in weights.items()}


def _int8(weights: dict[str, Array]) -> dict[str, Array]:
    """Matrices as bytes with a scale for every row."""
    arrays: dict[str, Array] = {}
    for name, array in weights.items():
        if array.ndim == 1 or array.dtype.kind != "f":
            arrays[name] = array
            continue
        quantized = INT8Quantizer().quantize_weights(array.reshape(len(array), -1))
        arrays[name] = quantized.q.reshape(array.shape)
        arrays[f"{name}.scale"] = np.broadcast_to(quantized.scale.reshape(-1), len(array)).astype(np.float32)
    return arrays


def _tiles(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Tiles of the space that `tilewise tune` searches, for the three products of the mlp."""
    shapes = [(32, 256, 64), (32, 128, 256), (32, 10, 128)]
    outcomes = []
    for shape in shapes:
        space = tile_space("matmul", shape, layout="nt")
        tile = space[int(rng.integers(len(space)))].as_dict()
        packs = {name: bool(tile[name]) for name in ("pack_a", "pack_b") if name in tile}
        sizes = {name: int(tile[name]) for name in ("mr", "nr", "mc", "nc", "kc")}
        outcomes.append({"shape": list(shape), "layout": "nt", "tile": sizes | packs})
    return outcomes


# --- tile predictions ---


@lru_cache(maxsize=1)
def _practice() -> dict[str, Array]:
    """The shipped model's order of every practice kernel's configurations."""
    from tilewise.bench.scoring import PRACTICE_SPLIT
    from tilewise.costmodel import load_dataset, rank
    from tilewise.costmodel.models.scorer import shipped_scorer

    collection, split = PRACTICE_SPLIT
    scorer = shipped_scorer(collection)
    return {kernel.name: np.asarray(rank(scorer, kernel).top(20)) for kernel in load_dataset(collection).split(split)}


def tile_entry(rng: np.random.Generator, folder: Path) -> dict[str, Any]:
    """A model that orders somewhat otherwise than the shipped one."""
    from tilewise.costmodel.course.predictions import write_predictions

    spread = float(rng.uniform(0, 8))
    rankings = {}
    for name, order in _practice().items():
        places = np.arange(len(order)) + spread * rng.standard_normal(len(order))
        rankings[name] = order[np.argsort(places)][:5]
    write_predictions(folder / "p.csv", rankings, 5)
    return {"tilewise": 1, "event": "TILE_OLYMPIAD", "predictions": "p.csv"}


# --- plugins ---

_MODEL = """
import numpy as np
from tilewise import Tensor, models, no_grad

def load(event, folder):
    model = models.pretrained("{model}")
    def answer(x):
        with no_grad():
            return np.asarray(model(Tensor(x)))
    return answer
"""
_BY_HAND = """
import numpy as np

def load(event, folder):
    stored = np.load(folder / "weights.npz")
    w = [stored[n].astype(np.float32).T.copy() for n in ("a", "c", "e")]
    b = [stored[n].astype(np.float32) for n in ("b", "d", "f")]
    def answer(x):
        for at in range(3):
            x = x @ w[at] + b[at]
            if at < 2:
                x = np.maximum(x, 0)
        return x
    return answer
"""
_IN_PLACE = """
import numpy as np
from tilewise import models

def load(event, folder):
    held = [t.data for _, t in models.pretrained("mlp").named_tensors()]
    w, b = [np.ascontiguousarray(m.T) for m in held[::2]], held[1::2]
    outs = [np.empty((32, m.shape[1]), np.float32) for m in w]
    def answer(x):
        for at in range(3):
            x = np.matmul(x, w[at], out=outs[at])
            x += b[at]
            if at < 2:
                np.maximum(x, 0, out=x)
        return x
    return answer
"""
_QUANTIZED = """
import numpy as np
from tilewise import Tensor, models, no_grad
from tilewise.quantize import quantize

def load(event, folder):
    rng = np.random.default_rng(0)
    shape = {{"mlp": (64, 64), "cnn": (64, 1, 8, 8)}}["{model}"]
    seen = [rng.random(shape, np.float32) * (rng.random(shape) < 0.5) for _ in range(8)]
    model = quantize(models.pretrained("{model}"), seen, keep_float=())
    def answer(x):
        with no_grad():
            return np.asarray(model(Tensor(x)))
    return answer
"""
_THREADED = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from tilewise import Tensor, models, no_grad

def load(event, folder):
    model, pool = models.pretrained("{model}"), ThreadPoolExecutor(2)
    def half(x):
        with no_grad():
            return np.asarray(model(Tensor(np.ascontiguousarray(x))))
    return lambda x: np.concatenate(list(pool.map(half, (x[:16], x[16:]))))
"""
_TALKATIVE = "import tempfile, warnings\nprint('loading')\nwarnings.warn('careful')\n" + _MODEL.replace(
    "    def answer", "    with tempfile.TemporaryFile() as kept:\n        kept.write(bytes(4096))\n    def answer"
)
_LISTS = _MODEL.replace("np.asarray(model(Tensor(x)))", "np.asarray(model(Tensor(x))).tolist()")
_FILES = _MODEL.replace(
    "    def answer",
    "    np.save('/tmp/first.npy', next(t.data for _, t in model.named_tensors()))\n    def answer",
)
_BACKGROUND = _THREADED.replace("ThreadPoolExecutor(2)", "ThreadPoolExecutor(4)").replace(
    "(x[:16], x[16:])", "(x[:8], x[8:16], x[16:24], x[24:])"
)
_COLLECTS = _MODEL.replace("    def answer(x):", "    import gc\n    def answer(x):\n        gc.collect(0)")
_CACHED_TEXT = """
import numpy as np
from tilewise import models
from tilewise.generate import generate

def load(event, folder):
    model = models.pretrained("gpt")
    return lambda prompt: np.fromiter(generate(model, prompt, 200), np.int64)
"""
_TEXTS = {
    "plain": _MODEL,
    "by hand": _BY_HAND,
    "in place": _IN_PLACE,
    "quantized": _QUANTIZED,
    "threaded": _THREADED,
    "talkative": _TALKATIVE,
    "lists of numbers": _LISTS,
    "writes files": _FILES,
    "four threads": _BACKGROUND,
    "collects garbage": _COLLECTS,
    "cached": _CACHED_TEXT,
}
PLUGINS = [("MLP_SPRINT", name) for name in ("plain", "by hand", "in place", "quantized", "threaded", "talkative")] * 2
PLUGINS += [("CNN_MARATHON", name) for name in ("plain", "quantized", "threaded", "talkative")] * 2
_NEWER = ("lists of numbers", "writes files", "four threads", "collects garbage")
PLUGINS += [(event, name) for event in ("MLP_SPRINT", "CNN_MARATHON") for name in _NEWER]
PLUGINS += [("TRANSFORMER_DECATHLON", "cached")]


def written_plugin(rng: np.random.Generator, event: str, name: str, folder: Path) -> Path:
    """The plugin's file, and its weights beside it where it brings them."""
    model = TinyMLPerf.event(event).model_name
    text = _TEXTS[name]
    (folder / "plugin.py").write_text(text if "{model}" not in text else text.format(model=model))
    if name == "by hand":
        dtype = str(rng.choice(["float32", "float16"]))
        weights = [tensor.data.astype(dtype) for _, tensor in TinyMLPerf.MLP_SPRINT.model().named_tensors()]
        np.savez(folder / "weights.npz", **dict(zip("abcdef", weights, strict=True)))  # type: ignore[arg-type]
    return folder / "plugin.py"


# --- scoring them ---


@dataclass(frozen=True)
class Outcome:
    """What became of an entry: the sentence of its refusal, or how far above the floor it was."""

    entry: HonestEntry
    rejection: str
    above_floor: float | None
    seconds: float
    noisy: str = ""  # why this machine could not score it

    def __str__(self) -> str:
        scored = "scored" if self.above_floor is None else f"{self.above_floor:.1f} × the floor"
        is_settled = self.rejection or self.noisy or scored
        threads = f", {self.entry.threads} threads" if self.entry.threads > 1 else ""
        return f"{self.entry.number:4d}  {self.entry.what}{threads}: {is_settled} ({self.seconds:.1f} s)"


def scored(number: int) -> Outcome:
    """Score one entry as a fresh worker does: with ceilings of its own."""
    ceilings.cache_clear()
    before = tilewise.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="tilewise-honest-") as folder:
        entry = draw_entry(number, Path(folder))
        start = time.perf_counter()
        try:
            tilewise.set_num_threads(entry.threads)
            score = entry.score()
        except Rejected as error:
            return Outcome(entry, f"REFUSED, {error.code}: {error}", None, time.perf_counter() - start)
        except TooNoisy as error:
            return Outcome(entry, "", None, time.perf_counter() - start, f"TOO NOISY: {error}")
        finally:
            tilewise.set_num_threads(before)
    floor = score.figures.get("floor_s")
    above = None if floor is None else score.figures["entry"]["latency_s"]["p50"] / floor
    return Outcome(entry, "", above, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    outcomes = []
    for number in range(options.first, options.first + options.count):
        outcomes.append(scored(number))
        print(outcomes[-1], flush=True)
    rejections = [outcome for outcome in outcomes if outcome.rejection]
    margins = [outcome.above_floor for outcome in outcomes if outcome.above_floor is not None]
    closest = f"; the closest to the floor took {min(margins):.1f} times as long" if margins else ""
    noisy = sum(bool(outcome.noisy) for outcome in outcomes)
    print(f"{len(outcomes)} honest entries, {len(rejections)} refused, {noisy} not scored for noise{closest}")
    if rejections:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
