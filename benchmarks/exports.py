"""Networks as PyTorch exports them, loaded here, compared with ONNX Runtime and OpenVINO on the same file.

    python -m benchmarks.exports [--only vit_tiny mamba dcgan] [--exporters old new] [--opset 17] [--files FOLDER]

ViT-tiny with one projection for queries, keys and values; BERT-small with three, scores divided and softmaxed by hand;
four blocks as GPT-2 writes them, causal by a table of booleans, with GELU as a polynomial; and the networks of
`benchmarks.export_models`. The old exporter traces, the new one (dynamo) captures. The output has the number of
operations outside the native call and the error relative to ONNX Runtime next to the times. A ratio above 1 means that
tilewise is faster than the fastest peer. `--files` keeps the exported files, and uses those that are there.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from benchmarks import export_models
from benchmarks.others import print_mean, race
from tilewise.errors import TilewiseError


class Heads(nn.Module):
    """Attention by hand over (B, T, C)."""

    def __init__(self, width: int, heads: int, packed: bool, causal: bool) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            [nn.Linear(width, 3 * width)] if packed else [nn.Linear(width, width) for _ in range(3)]
        )
        self.out, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        projections = [layer(x) for layer in self.project]
        parts = projections if len(projections) == 3 else projections[0].split(c, 2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads)
        if self.causal:
            mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
            scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, first: bool, causal: bool, gelu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Heads(width, heads, first, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.gelu = first, gelu

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.down(self.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(self.gelu(self.up(x))))


class ViTTiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 192, 16, 16), nn.Parameter(torch.randn(1, 1, 192))
        self.places = nn.Parameter(torch.randn(1, 197, 192) * 0.1)
        self.blocks = nn.Sequential(*(Block(192, 3, True, False, F.gelu) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class OverIds(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, width), nn.Embedding(512, width)
        gelu = gelu_new if decoder else F.gelu
        self.blocks = nn.Sequential(*(Block(width, heads, decoder, decoder, gelu) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.blocks(self.words(ids) + self.places(torch.arange(ids.shape[1]))))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 30522, shape)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "vit_tiny": lambda: (ViTTiny(), torch.randn(1, 3, 224, 224)),
    "bert_small": lambda: (OverIds(4, 512, 8, False), ids(1, 128)),
    "gpt2_block": lambda: (OverIds(4, 768, 12, True), ids(1, 128)),
    **export_models.NETWORKS,
}


def exported(name: str, folder: Path, new: bool, opset: int) -> tuple[Path, np.ndarray]:
    torch.manual_seed(0)
    module, x = NETWORKS[name]()
    path = folder / f"{name}_{'new' if new else 'old'}_{opset}.onnx"
    if not path.exists():
        with torch.no_grad():
            torch.onnx.export(
                module.eval(), (x,), path, input_names=["x"], dynamo=new, opset_version=opset, verbose=False
            )
    return path, x.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--exporters", nargs="+", choices=("old", "new"), default=("old",))
    parser.add_argument("--opset", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--files", type=Path, help="folder of exported files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    ratios = {}
    for name, exporter in itertools.product(options.only, options.exporters):
        with tempfile.TemporaryDirectory() as folder:
            path, x = exported(name, options.files or Path(folder), exporter == "new", options.opset)
            title = f"{name}, {exporter} exporter"
            try:
                ratios[title] = race(title, path, x, options.threads, options.budget).ratio
            except TilewiseError as error:
                print(f"{name}: {str(error)[:160]}", flush=True)
    print_mean(ratios, len(options.only) * len(options.exporters))


if __name__ == "__main__":
    main()
