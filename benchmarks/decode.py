"""Generation compared with PyTorch: a token at a time over a cache, three model sizes, float32 and int8.

    python -m benchmarks.decode [threads] [bandwidth] [torch] [cache] [growth] [--threads 1] [--json FILE]

The peers are PyTorch eager with a preallocated cache, and the same model with its linear layers in dynamic INT8. Logits
are compared before anything is timed. Also measured: our own generation without a cache, how the total time grows with
the number of tokens, and the share of sequential read bandwidth that the matrix times vector kernels reach.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import tilewise
from benchmarks import torch_models
from benchmarks.harness import Row, compare, interleaved, write_results
from tilewise import models
from tilewise._extension import native
from tilewise.generate import generate, make_engine, new_cache

CONTEXT, PROMPT = 256, 64


class TorchDecoder:
    """The reference GPT in PyTorch eager, keys and values in buffers allocated once."""

    def __init__(self, model: Any, layers: int, width: int, heads: int) -> None:
        self.model, self.heads = model.eval(), heads
        self.keys = torch.zeros(layers, 1, heads, CONTEXT, width // heads)
        self.values = torch.zeros_like(self.keys)

    @torch.no_grad()
    def step(self, token: int, position: int) -> torch.Tensor:
        m = self.model
        x = m.token_embedding(torch.tensor([[token]])) + m.position_embedding(torch.tensor([position]))
        for i, block in enumerate(m.blocks):
            x = x + self.attend(block, block.norm1(x), i, position)
            x = x + block.linear2(F.gelu(block.linear1(block.norm2(x))))
        return m.head(m.norm(x))[0, 0]

    def attend(self, block: Any, x: torch.Tensor, layer: int, position: int) -> torch.Tensor:
        qkv = self.project(block, x).view(1, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        self.keys[layer, :, :, position] = qkv[1][:, :, 0]
        self.values[layer, :, :, position] = qkv[2][:, :, 0]
        keys, values = self.keys[layer, :, :, : position + 1], self.values[layer, :, :, : position + 1]
        mixed = F.scaled_dot_product_attention(qkv[0], keys, values)
        return block.self_attn.out_proj(mixed.transpose(1, 2).reshape(1, 1, -1))

    def project(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.qkv(x)


def torch_decoder(model: Any, size: str, int8: bool) -> TorchDecoder:
    layers, width, heads = models.GPT_SIZES[size]
    peer = torch_models.gpt(size)
    peer.load_state_dict({k: torch.from_numpy(np.asarray(v).copy()) for k, v in model.state_dict().items()})
    for block in peer.blocks:
        block.qkv = torch.nn.Linear(width, 3 * width)
        block.qkv.weight.data, block.qkv.bias.data = (
            block.self_attn.in_proj_weight.data,
            block.self_attn.in_proj_bias.data,
        )
        projection = torch.nn.Linear(width, width)
        projection.load_state_dict(block.self_attn.out_proj.state_dict())
        block.self_attn.out_proj = projection
    if int8:
        peer = torch.ao.quantization.quantize_dynamic(peer, {torch.nn.Linear}, dtype=torch.qint8)
    return TorchDecoder(peer, layers, width, heads)


class OurDecoder:
    def __init__(self, model: Any, weights: str) -> None:
        self.engine, self.cache = make_engine(model, weights), new_cache(model, 1)
        self.last_position = np.zeros(1, np.int64)

    def step(self, token: int, position: int) -> np.ndarray:
        return self.engine.run(np.array([[token, 0, position]]), self.cache, self.last_position)[0]


def checked(ours: OurDecoder, theirs: TorchDecoder, tolerance: float, tokens: np.ndarray) -> None:
    for position, token in enumerate(tokens):
        mine, other = ours.step(int(token), position), theirs.step(int(token), position).numpy()
        worst = float(np.abs(mine - other).max() / max(1.0, np.abs(other).max()))
        if worst > tolerance:
            raise SystemExit(f"logits differ from PyTorch's by {worst:.2g} of the largest")


def against_torch(size: str, threads: int, budget_s: float) -> list[Row]:
    model, rng = models.gpt(size), np.random.default_rng(0)
    tokens, rows = rng.integers(0, 65, PROMPT), []
    for weights, tolerance in (("float32", 1e-4), ("int8", 0.1)):
        ours, theirs = OurDecoder(model, weights), torch_decoder(model, size, weights == "int8")
        checked(ours, theirs, tolerance, tokens)
        name = f"gpt {size} {weights}, a token at position {PROMPT}"
        runs = {"tilewise": lambda o=ours: o.step(3, PROMPT), "pytorch": lambda t=theirs: t.step(3, PROMPT)}
        rows.append(compare(name, threads, runs, budget_s))
    return rows


def against_uncached(size: str, threads: int, new: int = 200, rounds: int = 3) -> Row:
    model, prompt = models.gpt(size), list(np.random.default_rng(1).integers(0, 65, 8))
    seconds: dict[str, list[float]] = {"tilewise": [], "without cache": []}
    tokens = {}
    for _ in range(rounds):
        for who, use_cache in (("tilewise", True), ("without cache", False)):
            start = time.perf_counter()
            tokens[who] = list(generate(model, prompt, new, use_cache=use_cache))
            seconds[who].append(time.perf_counter() - start)
    if tokens["tilewise"] != tokens["without cache"]:
        raise SystemExit("the cache changed the tokens")
    medians = {who: statistics.median(times) for who, times in seconds.items()}
    row = Row(f"gpt {size}, {new} tokens", threads, medians, medians["without cache"] / medians["tilewise"])
    print(row, flush=True)
    return row


def growth(threads: int) -> list[Row]:
    """The exponent p of total time ~ tokens^p from 64 to 1,000 new tokens, with the cache and without.

    With it, every length is generated from start to end. Without it, 1,000 tokens take minutes; but the time of a step
    depends on the length of its sequence alone, so steps are timed at two dozen lengths and summed up in between.
    """
    model, lengths = models.gpt("6x384", context=1024), np.array([64, 125, 250, 500, 1000])
    cached = [_generation_seconds(model, int(n)) for n in lengths]
    sampled = np.unique(np.r_[1, 8, np.linspace(16, 1000, 22).astype(int)])
    steps = np.interp(np.arange(1, 1001), sampled, [_whole_step_seconds(model, int(n)) for n in sampled])
    uncached = [float(steps[:n].sum()) for n in lengths]
    rows = []
    for who, seconds in (("with the cache", cached), ("without", uncached)):
        exponent = float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])
        ends = {f"{n} tokens": s for n, s in zip(lengths, seconds, strict=True)}
        rows.append(Row(f"gpt 6x384, exponent of total time {who}", threads, ends, exponent))
        print(rows[-1], flush=True)
    return rows


def _generation_seconds(model: Any, new: int) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        list(generate(model, [1], new))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _whole_step_seconds(model: Any, length: int) -> float:
    """One token without a cache, after `length` - 1 others."""
    prompt, times = np.random.default_rng(2).integers(0, 65, length), []
    for _ in range(3):
        start = time.perf_counter()
        next(generate(model, prompt, 1, use_cache=False))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def in_large_pages(count: int) -> np.ndarray:
    """Floats in memory that is new to the process, so that the large pages asked for are granted."""
    memory = mmap.mmap(-1, 4 * count + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.float32, count)
    buffer[:] = 1
    return buffer


def quickest_to_read(count: int) -> np.ndarray:
    """NumPy's memory or freshly mapped memory, whichever is read faster here: the shares are of the best."""
    buffers = {"NumPy": np.ones(count, np.float32), "mapped": in_large_pages(count)}
    reads = {name: lambda b=buffer: native.probe_read(b) for name, buffer in buffers.items()}
    seconds = interleaved(reads, 1, 1.0)
    return buffers[min(seconds, key=lambda name: seconds[name])]


def bandwidth_share(threads: int) -> list[Row]:
    """The 85M model's matrix x vector products, and its whole step, against reading as many bytes once, in order."""
    model, rows = models.gpt("12x768"), []
    for weights in ("float32", "int8"):
        ours = OurDecoder(model, weights)
        buffer = quickest_to_read(ours.engine.weight_bytes // 4)
        read_all = lambda b=buffer: native.probe_read(b)  # noqa: E731
        for what, run in (
            ("matrix x vector", ours.engine.products),
            ("whole step", lambda o=ours: o.step(3, PROMPT)),
        ):
            name = f"gpt 12x768 {weights} {what}, share of read bandwidth"
            rows.append(compare(name, threads, {"tilewise": run, "read once": read_all}, 3.0))
    return rows


def thread_gain(threads: int, seconds: float = 3.0) -> list[Row]:
    """A step on `threads` threads compared with one, in interleaved blocks: a pool is rebuilt when its size changes."""
    rows = []
    for size in models.GPT_SIZES if threads > 1 else ():
        model = models.gpt(size)
        for weights in ("float32", "int8"):
            ours, times = OurDecoder(model, weights), {threads: list[float](), 1: list[float]()}
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline:
                for count, readings in times.items():
                    tilewise.set_num_threads(count)
                    readings += _step_seconds(ours, 0.1)
            medians = {"tilewise": statistics.median(times[threads]), "one thread": statistics.median(times[1])}
            name = f"gpt {size} {weights}, a token beside one thread"
            rows.append(Row(name, threads, medians, medians["one thread"] / medians["tilewise"]))
            print(rows[-1], flush=True)
    tilewise.set_num_threads(threads)
    return rows


def _step_seconds(ours: OurDecoder, seconds: float) -> list[float]:
    """Time single steps for `seconds`, after the threads have woken."""
    times, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 4:
        start = time.perf_counter()
        ours.step(3, PROMPT)
        times.append(time.perf_counter() - start)
    return times[2:]


PARTS = {
    "threads": thread_gain,
    "bandwidth": bandwidth_share,
    "torch": lambda threads: [row for size in models.GPT_SIZES for row in against_torch(size, threads, 2.0)],
    "cache": lambda threads: [against_uncached(size, threads) for size in ("4x128", "6x384")],
    "growth": growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure (all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/decode.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    rows = [row for part in options.parts or PARTS for row in PARTS[part](options.threads)]
    if not options.parts:  # a part alone does not replace the whole
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
