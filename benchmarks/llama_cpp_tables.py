"""The tables of docs/gguf.md: speed and perplexity of generation, compared with llama.cpp and CTranslate2."""

from __future__ import annotations

import itertools

from benchmarks.cases import age_note
from benchmarks.results_files import HOME_KIND, dates, kinds, rows, table


def speeds() -> str:
    """Tabulate milliseconds of a token and of a prompt against llama.cpp, for each kind of CPU."""
    gains = [row["ratio"] for kind in kinds() for row in rows("llama_cpp", "beside", kind=kind)]
    times = f"{min(gains):.2f} to {max(gains):.2f} times"
    bits = f"With four-bit weights, tilewise generates a token {times} as fast as with eight-bit weights"
    return f"{_speeds('llama_cpp', 'llama.cpp')}\n{bits}\n(`python -m benchmarks.llama_cpp bits`)."


def beside_ctranslate2() -> str:
    """Tabulate the same against CTranslate2, whose calls are whole generations."""
    return _speeds("ctranslate2", "CTranslate2")


def models() -> str:
    """Tabulate llama.cpp's time over ours on the same model files, by shape and format."""
    kind = next(kind for kind in kinds() if rows("gguf_models", kind=kind))
    timings = rows("gguf_models", kind=kind)
    ratios = {(row["name"], row["threads"]): f"{row['ratio']:.2f}" for row in timings}
    columns = [("a token", 1), ("a token", 2), ("four sequences", 1), ("a prompt of 256", 1), ("a prompt of 256", 2)]
    columns += [("64 tokens at 4096", 1)]
    files = sorted({row["name"].split(", ")[0] for row in timings})
    cells = [[file, *(ratios.get((f"{file}, {case}", threads), "") for case, threads in columns)] for file in files]
    headings = ["file", *(case if threads == 1 else f"{case}, 2 threads" for case, threads in columns)]
    return f"{table(headings, cells)}\n\n{kind}, measured {dates(timings)}{age_note(timings[0], 'gguf_models')}."


def _speeds(file: str, title: str) -> str:
    cells, ratios = [], []
    for kind in kinds():
        for row in rows(file, "", "perplexity|beside", kind):
            ratios.append(row)
            (peer,) = (who for who in row["seconds"] if who != "tilewise")
            ours, theirs = (f"{row['seconds'][who] * 1e3:.2f}" for who in ("tilewise", peer))
            perplexities = (_perplexity(file, row["name"], who, kind) for who in ("tilewise", peer))
            cells.append([row["name"], kind, ours, theirs, f"{row['ratio']:.2f}×", *perplexities])
    headings = ("case", "CPU", "tilewise, ms", f"{title}, ms", "ratio", "perplexity, tilewise", f"perplexity, {title}")
    note = f"The times in the table were measured on one thread, {dates(ratios)}{age_note(ratios[0], file)}."
    return f"{table(headings, cells)}\n\n{note}"


def _perplexity(file: str, case: str, who: str, kind: str) -> str:
    """Return the perplexity of the format of a case relative to float32, on this kind of CPU if it was measured there.

    Four-bit weights were rounded to nearest for the timing.
    """
    (form,) = (form for form in ("float32", "int8", "int4") if form in case)
    form = "int8" if who.endswith(" int8") else form  # CTranslate2's own, compared with our four bits
    if form == "float32":
        return "1"
    for source, cpu in itertools.product(dict.fromkeys((file, "llama_cpp")), dict.fromkeys((kind, HOME_KIND))):
        for row in rows(source, f"perplexity.*: {form}(, to the nearest)?$", kind=cpu):
            values = {name.split()[0]: value for name, value in row["seconds"].items()}
            if who.split()[0] in values:
                return f"{values[who.split()[0]]:.4f}"
    return ""


def perplexities() -> str:
    """Return the perplexity of the trained character GPT on held-out text, relative to float32."""
    cells = []
    for row in rows("llama_cpp", "perplexity"):
        (peer,) = (who for who in row["seconds"] if who != "tilewise")
        name = row["name"].split(": ", 1)[1]
        cells.append([name, f"{row['seconds']['tilewise']:.4f}", f"{peer}: {row['seconds'][peer]:.4f}"])
    return table(("weights", "tilewise", "llama.cpp"), cells)
