"""Networks of kinds that the zoo does not have, as PyTorch users write them, for `benchmarks.exports`.

Each entry of `NETWORKS` makes a module and an example of its input. Weights are random; sizes are small and odd.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def heads_of(x: Tensor, count: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Block(nn.Module):
    """Attention without scale, a bias by relative position, RMS norms, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = RMSNorm(width), RMSNorm(width), heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (heads_of(layer(y), self.heads) for layer in (self.q, self.k, self.v))
        y = ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.o(y)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class T5Encoder(nn.Module):
    def __init__(self, layers: int = 4, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(32128, width), nn.Embedding(32, heads)
        self.blocks, self.norm = nn.ModuleList(T5Block(width, heads) for _ in range(layers)), RMSNorm(width)

    def buckets(self, length: int) -> Tensor:
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        near, far = distance.abs(), distance.abs().clamp(min=1).float()
        large = (8 + (torch.log(far / 8) / math.log(128 / 8) * 8).long()).clamp(max=15)
        return torch.where(near < 8, near, large) + 16 * (distance > 0).long()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        bias = self.bias(self.buckets(ids.shape[1])).permute(2, 0, 1)[None]
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


class LlamaBlock(nn.Module):
    """Rotary embeddings, fewer key heads than query heads, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        narrow = width // heads * groups
        self.norm1, self.norm2, self.heads, self.groups = RMSNorm(width), RMSNorm(width), heads, groups
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        y, (b, t, _) = self.norm1(x), x.shape
        q, k, v = heads_of(self.q(y), self.heads), heads_of(self.k(y), self.groups), heads_of(self.v(y), self.groups)
        q, k = (z * cos + torch.cat([-z.chunk(2, -1)[1], z.chunk(2, -1)[0]], -1) * sin for z in (q, k))
        repeats = self.heads // self.groups
        k, v = (
            z[:, :, None].expand(b, self.groups, repeats, t, z.shape[-1]).reshape(b, self.heads, t, -1) for z in (k, v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 4, width: int = 384, heads: int = 6, groups: int = 2) -> None:
        super().__init__()
        self.words, self.norm, self.dim = nn.Embedding(32000, width), RMSNorm(width), width // heads
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x, t = self.words(ids), ids.shape[1]
        angles = torch.outer(torch.arange(t).float(), 1e-4 ** (torch.arange(0, self.dim, 2) / self.dim)).repeat(1, 2)
        mask = torch.full((t, t), -1e9).triu(1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        return self.norm(x)


class RWKVBlock(nn.Module):
    """The weighted sum over earlier tokens as a loop over them, which the exporter unrolls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.k, self.v, self.r, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down, self.receive = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(3 * width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.mix, self.decay, self.first = (nn.Parameter(torch.rand(width)) for _ in range(3))

    def mixed(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return x * self.mix + before * (1 - self.mix)

    def time_mix(self, x: Tensor) -> Tensor:
        y = self.mixed(x)
        k, v, r = self.k(y), self.v(y), self.r(y).sigmoid()
        above, below, top, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.full_like(x[:, 0], -38), []
        for t in range(x.shape[1]):
            peak = torch.maximum(top, self.first + k[:, t])
            old, new = torch.exp(top - peak), torch.exp(self.first + k[:, t] - peak)
            out.append((old * above + new * v[:, t]) / (old * below + new))
            peak = torch.maximum(top - self.decay, k[:, t])
            old, new = torch.exp(top - self.decay - peak), torch.exp(k[:, t] - peak)
            above, below, top = old * above + new * v[:, t], old * below + new, peak
        return self.o(r * torch.stack(out, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time_mix(self.norm1(x))
        y = self.mixed(self.norm2(x))
        return x + self.receive(y).sigmoid() * self.down(F.relu(self.up(y)).square())


class MambaBlock(nn.Module):
    """A selective scan as a loop over the tokens, or by cumulative sums of logarithms."""

    def __init__(self, width: int, state: int, loop: bool) -> None:
        super().__init__()
        inner, rank = 2 * width, width // 16
        self.norm, self.into, self.out = (
            RMSNorm(width),
            nn.Linear(width, 2 * inner, bias=False),
            nn.Linear(inner, width),
        )
        self.conv, self.select = nn.Conv1d(inner, inner, 4, padding=3, groups=inner), nn.Linear(inner, rank + 2 * state)
        self.step, self.skip = nn.Linear(rank, inner), nn.Parameter(torch.ones(inner))
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(inner, 1)))
        self.sizes, self.loop = (rank, state, state), loop

    def scan(self, x: Tensor) -> Tensor:
        rank, b, c = self.select(x).split(self.sizes, -1)
        step = F.softplus(self.step(rank))  # (B, T, inner)
        log_decay = -step[..., None] * torch.exp(self.log_decay)  # (B, T, inner, state)
        inputs = (step * x)[..., None] * b[:, :, None]
        if self.loop:
            decay, state, out = torch.exp(log_decay), torch.zeros_like(inputs[:, 0]), []
            for t in range(x.shape[1]):
                state = decay[:, t] * state + inputs[:, t]
                out.append((state * c[:, t, None]).sum(-1))
            y = torch.stack(out, 1)
        else:
            total = torch.clamp(log_decay.cumsum(1), min=-60)
            y = ((torch.exp(total) * (inputs / (torch.exp(total) + 1e-12)).cumsum(1)) * c[:, :, None]).sum(-1)
        return y + x * self.skip

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.into(self.norm(x)).chunk(2, -1)
        inner = self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(self.scan(F.silu(inner)) * F.silu(gate))


class Words(nn.Module):
    """Blocks over embedded tokens."""

    def __init__(self, width: int, *blocks: nn.Module) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(5000, width), nn.Sequential(*blocks)

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.words(ids))


def dcgan() -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False), nn.BatchNorm2d(512), nn.ReLU()]
    for inputs, outputs in ((512, 256), (256, 128), (128, 64)):
        layers += [
            nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


class TCNBlock(nn.Module):
    """Two dilated causal convolutions, with a residual."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(inputs, outputs, 3, padding=2 * dilation, dilation=dilation)
        self.second = nn.Conv1d(outputs, outputs, 3, padding=2 * dilation, dilation=dilation)
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.cut = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x)[..., : -self.cut])
        return F.relu(F.relu(self.second(y)[..., : -self.cut]) + self.skip(x))


class WavBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + self.o(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Wav2Vec(nn.Module):
    """Strided convolutions over samples, a grouped convolution for the position, transformer blocks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        first = [nn.Conv1d(1, 128, 10, 5, bias=False), nn.GroupNorm(128, 128), nn.GELU()]
        others = [m for k in (3, 3, 3, 3, 2) for m in (nn.Conv1d(128, 128, k, 2, bias=False), nn.GELU())]
        self.features, self.norm, self.project = (
            nn.Sequential(*first, *others),
            nn.LayerNorm(128),
            nn.Linear(128, width),
        )
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        self.blocks = nn.Sequential(*(WavBlock(width, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(self.norm(self.features(x).transpose(1, 2)))
        return self.blocks(x + F.gelu(self.position(x.transpose(1, 2))).transpose(1, 2))


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation=dilation, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(4)]
        pairs = list(itertools.pairwise(sizes))
        self.first = nn.Sequential(conv(3, width), conv(width, width))
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), conv(i, o), conv(o, o)) for i, o in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(pairs))
        self.join = nn.ModuleList(nn.Sequential(conv(2 * i, i), conv(i, i)) for i, _ in reversed(pairs))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for layer in self.down:
            values.append(layer(values[-1]))
        y = values.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = join(torch.cat([values.pop(), up(y)], 1))
        return self.out(y)


class SSD(nn.Module):
    """Boxes and classes of four feature maps, flattened and concatenated."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        sizes = ((3, 32), (32, 64), (64, 128))
        self.stem = nn.Sequential(*(nn.Sequential(conv(i, o), conv(o, o, stride=2)) for i, o in sizes))
        self.stages = nn.ModuleList(
            nn.Sequential(conv(i, o // 2, 1), conv(o // 2, o, stride=2))
            for i, o in ((128, 256), (256, 256), (256, 128))
        )
        channels = (128, 256, 256, 128)
        self.boxes = nn.ModuleList(nn.Conv2d(c, 6 * 4, 3, padding=1) for c in channels)
        self.scores = nn.ModuleList(nn.Conv2d(c, 6 * classes, 3, padding=1) for c in channels)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.stem(x)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))

        def rows(layers: nn.ModuleList, size: int) -> Tensor:
            results = (layer(y) for layer, y in zip(layers, maps, strict=True))
            parts = [result.permute(0, 2, 3, 1).reshape(x.shape[0], -1, size) for result in results]
            return torch.cat(parts, 1)

        return torch.cat([rows(self.boxes, 4), rows(self.scores, self.classes).softmax(-1)], -1)


class DeepLab(nn.Module):
    """Dilated convolutions of several rates beside the image's mean, resized to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 32, stride=2), conv(32, 64, stride=2), conv(64, 128, stride=2))
        self.body = nn.Sequential(conv(128, 128), conv(128, 128, dilation=2), conv(128, 128, dilation=4))
        self.rates = nn.ModuleList([conv(128, 64, 1), *(conv(128, 64, dilation=rate) for rate in (6, 12, 18))])
        self.mean, self.join = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(128, 64, 1), nn.ReLU()),
            conv(320, 64, 1),
        )
        self.out = nn.Sequential(conv(64, 64), nn.Conv2d(64, 21, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.stem(x))
        mean = F.interpolate(self.mean(y), y.shape[-2:], mode="bilinear", align_corners=False)
        y = self.out(self.join(torch.cat([*(rate(y) for rate in self.rates), mean], 1)))
        return F.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)


class Recurrent(nn.Module):
    """Recurrent layers and a linear head over every step."""

    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.layer = kind(96, width, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (1 + bidirectional), 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


def video() -> nn.Module:
    def part(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()
        )  # fmt: skip

    parts = [part(3, 24, 1), nn.MaxPool3d((1, 2, 2)), part(24, 48, 1), part(48, 64, 2), part(64, 96, 2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(96, 101))


def tokens(length: int) -> Tensor:
    return torch.randint(0, 5000, (1, length))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "t5_encoder": lambda: (T5Encoder(), tokens(77)),
    "llama_prefill": lambda: (Llama(), tokens(61)),
    "rwkv": lambda: (Words(192, *(RWKVBlock(192) for _ in range(3))), tokens(31)),
    "mamba": lambda: (Words(192, *(MambaBlock(192, 16, True) for _ in range(2))), tokens(31)),
    "mamba_cumsum": lambda: (Words(192, *(MambaBlock(192, 16, False) for _ in range(2))), tokens(31)),
    "dcgan": lambda: (dcgan(), torch.randn(1, 100, 1, 1)),
    "tcn": lambda: (
        nn.Sequential(*(TCNBlock(i, 64, 2**d) for d, i in enumerate((24, 64, 64, 64, 64)))),
        torch.randn(1, 24, 333),
    ),
    "wav2vec": lambda: (Wav2Vec(), torch.randn(1, 1, 16001)),
    "unet": lambda: (UNet(), torch.randn(1, 3, 136, 104)),
    "ssd": lambda: (SSD(), torch.randn(1, 3, 193, 161)),
    "deeplab": lambda: (DeepLab(), torch.randn(1, 3, 161, 193)),
    "lstm": lambda: (Recurrent(nn.LSTM, 192), torch.randn(1, 51, 96)),
    "lstm_2": lambda: (Recurrent(nn.LSTM, 384, 2), torch.randn(1, 37, 96)),
    "gru": lambda: (Recurrent(nn.GRU, 192), torch.randn(1, 51, 96)),
    "bilstm": lambda: (Recurrent(nn.LSTM, 128, 1, True), torch.randn(1, 51, 96)),
    "conv3d": lambda: (video(), torch.randn(1, 3, 9, 56, 49)),
}
