"""Generation compared with CTranslate2: decoding and prompts in float32 and int8, and what int8 costs in perplexity.

    python -m benchmarks.ctranslate2 [decode] [prefill] [perplexity] [--threads 1]

Both have the same weights; greedy tokens in float32 are compared before anything is timed. CTranslate2 runs a whole
generation in one call, so decoding is 16 tokens after a single one, and a prompt's row is a prompt of 256 with the
first token after it. It has no four-bit weights for CPUs, so ours are compared with its int8. Shapes and perplexities
are those of `benchmarks.llama_cpp`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.ctranslate2_peer import CTranslate2, write_gpt2
from benchmarks.gpt_cases import PROMPT, SIZES, gpt, logits_of, perplexity, rows_of
from benchmarks.harness import Row, compare, write_results
from tilewise import data, models
from tilewise.generate import make_engine, new_cache

NEW, COMPARED = 16, 64  # tokens timed, tokens that must be equal
FORMS = {"float32": "float32", "int8": "int8", "int4": "int8"}  # ours, theirs
Continue = Callable[[Any, int], list[int]]


def greedy(model: Any, weights: str) -> Continue:
    """Return a function that continues a text greedily with tilewise; the cache is reused between calls."""
    engine, cache, last_position = make_engine(model, weights), new_cache(model, 1), np.zeros(1, np.int64)

    def continued(tokens: Any, new: int) -> list[int]:
        logits = engine.run(rows_of(tokens), cache, np.array([len(tokens) - 1]))
        new_tokens = [int(logits[0].argmax())]
        while len(new_tokens) < new:
            position = len(tokens) + len(new_tokens) - 1
            logits = engine.run(np.array([[new_tokens[-1], 0, position]]), cache, last_position)
            new_tokens.append(int(logits[0].argmax()))
        return new_tokens

    return continued


def races(threads: int, folder: Path, label: str, prompt: int, new: int) -> list[Row]:
    rows = []
    for size, vocabulary in SIZES.items():
        model, tokens = gpt(vocabulary), np.random.default_rng(0).integers(0, 65, prompt)
        written = folder / size
        if not written.exists():
            write_gpt2(model, written)
        for weights, form in FORMS.items():
            ours, theirs = greedy(model, weights), CTranslate2(written, form, threads).continued
            if weights == "float32" and ours(tokens, COMPARED) != theirs(tokens, COMPARED):
                raise SystemExit("greedy tokens are not CTranslate2's")
            who = f"ctranslate2 {form}"
            runs = {"tilewise": lambda o=ours: o(tokens, new), who: lambda t=theirs: t(tokens, new)}  # noqa: B023
            rows.append(compare(f"{size} {weights}, {label}", threads, runs, 4.0))
    return rows


def decode(threads: int, folder: Path) -> list[Row]:
    return races(threads, folder, f"{NEW} tokens after one", 1, NEW)


def prefill(threads: int, folder: Path) -> list[Row]:
    return races(threads, folder, f"a prompt of {PROMPT} and a token", PROMPT, 1)


def perplexities(_: int, folder: Path) -> list[Row]:
    """Each over that of the same program in float32."""
    model, text = models.pretrained("gpt"), data.text().valid
    written = write_gpt2(model, folder / "trained")
    by_name = {}
    for form in ("float32", "int8"):
        by_name[form] = {
            "tilewise": perplexity(logits_of(model, form), text, model.context),
            "ctranslate2": perplexity(CTranslate2(written, form).logits, text, model.context),
        }
    ratios = {who: by_name["int8"][who] / by_name["float32"][who] for who in by_name["int8"]}
    row = Row("perplexity over float32's: int8", 1, ratios, ratios["ctranslate2"] / ratios["tilewise"])
    print(row.name, {who: round(value, 5) for who, value in ratios.items()}, flush=True)
    return [row]


PARTS = {"perplexity": perplexities, "decode": decode, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure (all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ctranslate2.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for part in options.parts or PARTS for row in PARTS[part](options.threads, Path(folder))]
    write_results(options.json, rows, keep=True)


if __name__ == "__main__":
    main()
