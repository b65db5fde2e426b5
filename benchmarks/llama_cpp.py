"""Generation compared with llama.cpp at the same number of bits: a token, a prompt of 256, and the cost in perplexity.

    python -m benchmarks.llama_cpp [perplexity] [decode] [bits] [prefill] [--threads 1] [--json FILE]

Needs `llama_cpp` (llama-cpp-python) and `gguf`. llama.cpp reads the same model from a GGUF file, in its own Q8_0 and
Q4_0; its logits are compared with ours in float32 before anything is timed. It cannot be held to AVX2 when it runs: for
TILEWISE_ISA=avx2 build it so (-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON). Speeds
are of random weights at GPT-2's shape, with 65 tokens (85 million parameters) and with 50,257; perplexities are of the
trained character GPT on the text it was not trained on, each over that of the same program in float32. Rows of
perplexity hold these ratios in place of seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.gguf_files import write_gpt2
from benchmarks.gpt_cases import CONTEXT, PROMPT, SIZES, gpt, logits_of, perplexity, rows_of
from benchmarks.harness import Row, compare, write_results
from benchmarks.llama_cpp_peer import LlamaCpp, quantized
from tilewise import data, models
from tilewise.generate import make_engine, new_cache
from tilewise.nn import GPT
from tilewise.quantize import quantize

BITS = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
POSITION = 64


def file_in(kind: str, path: Path) -> Path:
    return path if kind == "F32" else quantized(path, kind)


def check_logits(model: GPT, path: Path, tokens: Any) -> None:
    ours = make_engine(model).run(rows_of(tokens), new_cache(model, 1), np.arange(len(tokens)))
    theirs = LlamaCpp(path, CONTEXT).run(tokens, 0, everywhere=True)
    worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if worst > 2e-3:
        raise SystemExit(f"logits differ from llama.cpp's by {worst:.2g} of the largest")


def races(threads: int, what: Callable[..., dict[str, Callable[[], Any]]], label: str, folder: Path) -> list[Row]:
    rows, rng = [], np.random.default_rng(0)
    for size, vocabulary in SIZES.items():
        model, path = gpt(vocabulary), folder / f"{size}.gguf"
        if not path.exists():
            write_gpt2(model, path)
        tokens = rng.integers(0, 65, PROMPT)
        check_logits(model, path, tokens[:32])
        for weights, kind in BITS.items():
            engine, cache = make_engine(model, weights), new_cache(model, 1)
            peer = LlamaCpp(file_in(kind, path), CONTEXT, threads)
            engine.run(rows_of(tokens[:POSITION]), cache, np.zeros(1, np.int64)), peer.run(tokens[:POSITION], 0)
            rows.append(compare(f"{size} {weights}, {label}", threads, what(engine, cache, peer, tokens), 4.0))
    return rows


def decode(threads: int, folder: Path) -> list[Row]:
    def runs(engine: Any, cache: Any, peer: LlamaCpp, _: Any) -> dict[str, Callable[[], Any]]:
        row, last_position = np.array([[3, 0, POSITION]]), np.zeros(1, np.int64)
        return {"tilewise": lambda: engine.run(row, cache, last_position), "llama.cpp": lambda: peer.run([3], POSITION)}

    return races(threads, runs, f"a token at position {POSITION}", folder)


def bits(threads: int, _: Path) -> list[Row]:
    """A token with our four bits compared with our eight."""
    rows = []
    for size, vocabulary in SIZES.items():
        model = gpt(vocabulary)
        cache, row, last_position = new_cache(model, 1), np.array([[3, 0, POSITION]]), np.zeros(1, np.int64)
        four, eight = (make_engine(model, weights) for weights in ("int4", "int8"))
        runs = {
            "tilewise": partial(four.run, row, cache, last_position),
            "int8": partial(eight.run, row, cache, last_position),
        }
        rows.append(compare(f"{size}, four bits beside eight", threads, runs, 4.0))
    return rows


def prefill(threads: int, folder: Path) -> list[Row]:
    def runs(engine: Any, cache: Any, peer: LlamaCpp, tokens: Any) -> dict[str, Callable[[], Any]]:
        rows, last_position = rows_of(tokens), np.array([len(tokens) - 1])
        return {"tilewise": lambda: engine.run(rows, cache, last_position), "llama.cpp": lambda: peer.run(tokens, 0)}

    return races(threads, runs, f"a prompt of {PROMPT}", folder)


# --- perplexity ---


def perplexities(_: int, folder: Path) -> list[Row]:
    model, text = models.pretrained("gpt"), data.text()
    context, path = model.context, folder / "trained.gguf"
    write_gpt2(model, path)
    pick = np.random.default_rng(0).integers(0, len(text.train) - context, (8, 8))
    calibration = [np.stack([text.train[start : start + context] for start in starts]) for starts in pick]
    contenders: dict[str, tuple[Any, str, str]] = {
        "int8": (model, "int8", "Q8_0"),
        "int4, to the nearest": (model, "int4", "Q4_0"),
        "int4, by calibration data": (quantize(model, calibration, bits=4), "float32", "Q4_0"),
        "int4 with minimums, by calibration data": (
            quantize(model, calibration, bits=4, symmetric=False),
            "float32",
            "Q4_1",
        ),
    }
    ours = perplexity(logits_of(model, "float32"), text.valid, context)
    plain = LlamaCpp(path, context)
    theirs = perplexity(lambda ids: plain.run(ids, 0, True), text.valid, context)
    rows = []
    for name, (network, weights, kind) in contenders.items():
        peer = LlamaCpp(quantized(path, kind), context)
        ratios = {
            "tilewise": perplexity(logits_of(network, weights), text.valid, context) / ours,
            f"llama.cpp {kind}": perplexity(lambda ids, p=peer: p.run(ids, 0, True), text.valid, context) / theirs,
        }
        rows.append(
            Row(f"perplexity over float32's: {name}", 1, ratios, ratios[f"llama.cpp {kind}"] / ratios["tilewise"])
        )
        print(rows[-1].name, {who: round(value, 5) for who, value in ratios.items()}, flush=True)
    return rows


PARTS = {"perplexity": perplexities, "decode": decode, "bits": bits, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure (all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/llama_cpp.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for part in options.parts or PARTS for row in PARTS[part](options.threads, Path(folder))]
    write_results(options.json, rows, keep=True)


if __name__ == "__main__":
    main()
