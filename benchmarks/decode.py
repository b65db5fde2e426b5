"""Generation beside PyTorch: a token at a time over a cache, three model sizes, float32 and int8.

    python -m benchmarks.decode [--threads 1] [--json benchmarks/results/decode.json]

The peers are PyTorch eager with a preallocated cache, and the same model with its linear layers in dynamic INT8. Logits
are compared before anything is timed. Also measured: our own generation without a cache, how the total time grows with
the number of tokens, and the share of sequential read bandwidth that the matrix times vector kernels reach.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import tilewise
from benchmarks import torch_models
from benchmarks.harness import Row, compare, write_results
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
        self.wanted = np.zeros(1, np.int64)

    def step(self, token: int, position: int) -> np.ndarray:
        return self.engine.run(np.array([[token, 0, position]]), self.cache, self.wanted)[0]


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


def against_uncached(size: str, threads: int, new: int = 200) -> Row:
    model = models.gpt(size)
    runs = {
        "tilewise": lambda: list(generate(model, [1], new)),
        "without cache": lambda: list(generate(model, [1], new, use_cache=False)),
    }
    if runs["tilewise"]() != runs["without cache"]():
        raise SystemExit("the cache changed the tokens")
    return compare(f"gpt {size}, {new} tokens", threads, runs, 1.0)


def growth(use_cache: bool, lengths: tuple[int, ...]) -> float:
    """The exponent p of total time ~ tokens^p, fitted over `lengths`."""
    model = models.gpt("6x384", context=1024)
    seconds = []
    for n in lengths:
        start = time.perf_counter()
        list(generate(model, [1], n, use_cache=use_cache))
        seconds.append(time.perf_counter() - start)
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def bandwidth_share(threads: int) -> list[Row]:
    """The 85M model's step against reading its weights once, in order."""
    model = models.gpt("12x768")
    rows = []
    for weights, width in (("float32", 4), ("int8", 1)):
        ours = OurDecoder(model, weights)
        elements = sum(p.data.size for name, p in model.named_parameters() if "embedding" not in name)
        buffer = np.ones(elements * width // 4, np.float32)
        runs = {"tilewise": lambda o=ours: o.step(3, 8), "read once": lambda b=buffer: native.probe_read(b)}
        rows.append(compare(f"gpt 12x768 {weights} step, share of read bandwidth", threads, runs, 3.0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/decode.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    rows = [row for size in models.GPT_SIZES for row in against_torch(size, options.threads, 2.0)]
    rows += bandwidth_share(options.threads)
    rows += [against_uncached("4x128", options.threads), against_uncached("6x384", options.threads)]
    if not options.quick:
        lengths = (64, 250, 500, 1000)
        cached, uncached = growth(True, lengths), growth(False, lengths)
        print(f"total time grows with exponent {cached:.2f} with the cache, {uncached:.2f} without")
    write_results(options.json, rows)


if __name__ == "__main__":
    main()
