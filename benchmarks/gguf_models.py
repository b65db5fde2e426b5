"""GGUF files of today's architectures compared with llama.cpp: a token, four sequences, a prompt, a prompt at 4096.

    python -m benchmarks.gguf_models [tinyllama ...] [--kinds F16 Q8_0 ...] [--threads 1] [--folder DIR] [--json FILE]

Both programs read the same file: random weights with outlier channels in the shape of a published model, with fewer
layers and the part of the vocabulary that keeps the output layer's share of the work. Logits are compared before
anything is timed. llama.cpp is llama-cpp-python, built for this CPU. Both caches hold float16.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import tilewise
from benchmarks.gguf_files import finish
from benchmarks.gpt_cases import rows_of
from benchmarks.harness import Row, compare, write_results
from benchmarks.llama_cpp_peer import LlamaCpp, quantized
from tilewise.generate import make_engine, new_cache
from tilewise.gguf import load_gguf

VOCABULARY, LONG = 32768, 4096
# Architecture, layers, width, heads, key heads, head width, hidden width, whether the embedding is the output layer
SHAPES = {
    "tinyllama": ("llama", 4, 2048, 32, 4, 64, 5632, False),
    "smollm": ("llama", 12, 576, 9, 3, 64, 1536, True),
    "qwen3": ("qwen3", 4, 1024, 16, 8, 128, 3072, True),
    "gemma3": ("gemma3", 4, 1152, 4, 1, 256, 6912, True),
}
KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def write(shape: str, path: Path) -> None:
    """A model file in float32, without a tokenizer."""
    architecture, layers, width, heads, kv_heads, head_width, hidden, tied = SHAPES[shape]
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_context_length(2 * LONG)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_dimension_count(head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(0)
    if architecture == "gemma3":
        writer.add_sliding_window(512)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        weight = rng.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)
        weight[:, rng.choice(inputs, inputs // 100, replace=False)] *= 8  # outlier channels, as real models have
        writer.add_tensor(f"{name}.weight", weight)

    def norms(prefix: str, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            values = 1 + 0.1 * rng.standard_normal(size, np.float32)
            writer.add_tensor(f"{prefix}{name}_norm.weight", values)

    matrix("token_embd", VOCABULARY, width)
    if not tied:
        matrix("output", VOCABULARY, width)
    norms("", {"output": width})
    for i in range(layers):
        block = f"blk.{i}."
        norms(block, {"attn": width, "ffn": width})
        if architecture != "llama":
            norms(block, {"attn_q": head_width, "attn_k": head_width})
        if architecture == "gemma3":
            norms(block, {"post_attention": width, "post_ffw": width})
        for name, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
            matrix(block + name, count * head_width, width)
        matrix(f"{block}attn_output", width, heads * head_width)
        matrix(f"{block}ffn_gate", hidden, width)
        matrix(f"{block}ffn_up", hidden, width)
        matrix(f"{block}ffn_down", width, hidden)
    finish(writer)


def file_of(shape: str, kind: str, folder: Path) -> Path:
    """The model file of a shape in a format; it is written unless the folder has it."""
    path = folder / f"{shape}.gguf"
    if not path.exists():
        write(shape, path)
    existing = path.with_suffix(f".{kind}.gguf")
    return existing if existing.exists() else quantized(path, kind, pure=True)


class Contest:
    """Both programs on one file, for some sequences of at most `context` tokens."""

    def __init__(self, path: Path, threads: int, context: int, sequences: int = 1) -> None:
        """Load the file in both; ours decodes some tokens to choose its number of threads."""
        model = load_gguf(path).model
        self.engine, self.cache = make_engine(model), new_cache(model, sequences, context, "float16")
        for position in range(16):
            self.step([1] * sequences, position)
        self.peer = LlamaCpp(path, context, threads, sequences)

    def run(self, tokens: Any, position: int) -> np.ndarray:
        """Our logits after some tokens of the first sequence from `position` on."""
        rows = rows_of(tokens)
        rows[:, 2] += position
        return self.engine.run(rows, self.cache, np.array([len(tokens) - 1]))[0]

    def step(self, tokens: Any, position: int) -> np.ndarray:
        """Our logits after one token of each sequence at `position`."""
        rows = np.array([[token, sequence, position] for sequence, token in enumerate(tokens)])
        return self.engine.run(rows, self.cache, np.arange(len(tokens)))

    def timed(self, what: str, count: int, position: int) -> dict[str, Callable[[], Any]]:
        """The calls to compare, of `what` ("run" or "step") with `count` tokens, once everything before is stored."""
        tokens = np.random.default_rng(1).integers(0, VOCABULARY, position + count)
        for start in range(0, position, 512):
            for program in (self, self.peer):
                if what == "run":
                    program.run(tokens[start : min(start + 512, position)], start)
        ours, theirs = getattr(self, what), getattr(self.peer, what)
        call = tokens[position:], position
        error = float(np.abs(ours(*call) - theirs(*call)).max() / np.abs(theirs(*call)).max())
        if what == "run" and error > 0.3:  # random weights amplify the rounding of inputs to 8 bits
            raise SystemExit(f"logits differ from llama.cpp's by {error:.2g} of the largest")
        return {"tilewise": lambda: ours(*call), "llama.cpp": lambda: theirs(*call)}


def races(shape: str, kind: str, threads: int, folder: Path) -> list[Row]:
    """Compare both programs on one file."""
    path, rows = file_of(shape, kind, folder), []
    cases = [("a token", "run", 1, 64, 1), ("a prompt of 256", "run", 256, 0, 1)]
    if threads == 1:
        cases += [("four sequences", "step", 4, 0, 4)]
    if threads == 1 and shape == "tinyllama":
        cases += [(f"64 tokens at {LONG}", "run", 64, LONG, 1)]
    for case, what, count, position, sequences in cases:
        contest = Contest(path, threads, 2 * position + 512, sequences)
        calls = contest.timed(what, count, position)
        rows.append(compare(f"{shape} {kind}, {case}", threads, calls))
        contest.peer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", choices=[[], *SHAPES], help="models (all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the model files here")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gguf_models.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        for shape in options.shapes or SHAPES:
            # Blocks of K formats have 256 values.
            kinds = [kind for kind in options.kinds if not kind.endswith("_K") or SHAPES[shape][2] % 256 == 0]
            for kind in kinds:
                rows = races(shape, kind, options.threads, options.folder or Path(temporary))
                write_results(options.json, rows, keep=True)


if __name__ == "__main__":
    main()
