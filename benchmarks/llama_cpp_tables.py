"""The tables of docs/gguf.md: generation beside llama.cpp, speeds and what the bits cost in perplexity."""

from __future__ import annotations

from benchmarks.results_files import dates, kinds, rows, table


def speeds() -> str:
    """Milliseconds of a token and of a prompt, on every kind of CPU that they were measured on."""
    cells, found = [], []
    for kind in kinds():
        for row in rows("llama_cpp", "", "perplexity|beside", kind):
            found.append(row)
            ours, theirs = (f"{row['seconds'][who] * 1e3:.2f}" for who in ("tilewise", "llama.cpp"))
            cells.append([row["name"], kind, ours, theirs, f"{row['ratio']:.2f}×"])
    headings = ("case", "CPU", "tilewise, ms", "llama.cpp, ms", "ratio")
    return f"{table(headings, cells)}\n\nOne thread, measured {dates(found)}."


def perplexities() -> str:
    """Of the trained character GPT on held-out text, over float32's."""
    cells = []
    for row in rows("llama_cpp", "perplexity"):
        (peer,) = (who for who in row["seconds"] if who != "tilewise")
        name = row["name"].split(": ", 1)[1]
        cells.append([name, f"{row['seconds']['tilewise']:.4f}", f"{peer}: {row['seconds'][peer]:.4f}"])
    return table(("weights", "tilewise", "llama.cpp"), cells)
