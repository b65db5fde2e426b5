"""The reference models in PyTorch, written as a PyTorch user would, for comparisons and timings.

Names and layouts equal tilewise.models, so a state dict loads into either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewise.models import GPT_SIZES


def mlp(inputs: int = 64, classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes))


def cnn(channels: int = 1, size: int = 8, classes: int = 10) -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]

    return nn.Sequential(
        *block(channels, 32),
        *block(32, 64),
        nn.MaxPool2d(2),
        *block(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, classes),
    )


class GlobalAvgPool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def vgg6(classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for filters in (64, 64, 0, 128, 128, 0, 256):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()] if filters else [nn.MaxPool2d(2)]
        channels = filters or channels
    return nn.Sequential(*layers, GlobalAvgPool(), nn.Linear(channels, classes))


def of_layers(model: Any) -> nn.Module:
    """A stack of tilewise's convolutions, ReLUs and max pools, with the same weights."""
    layers: list[nn.Module] = []
    for layer in model:
        if hasattr(layer, "weight"):
            outputs, inputs = layer.weight.shape[:2]
            layers.append(nn.Conv2d(inputs, outputs, layer.kernel_size, layer.stride, layer.padding))
            layers[-1].load_state_dict({k: torch.from_numpy(v.data) for k, v in layer.state_dict().items()})
        else:
            layers.append(nn.MaxPool2d(2) if type(layer).__name__ == "MaxPool2d" else nn.ReLU())
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.skip = nn.Conv2d(channels, filters, 1, stride) if stride != 1 or channels != filters else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.skip is None else self.skip(x)
        return F.relu(self.conv2(F.relu(self.conv1(x))) + shortcut)


class ResNet8(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.block1, self.block2 = ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2)
        self.block3 = ResidualBlock(32, 64, 2)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block3(self.block2(self.block1(F.relu(self.conv(x)))))
        return self.fc(x.mean((2, 3)))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(size: str = "4x128", vocab: int = 65, context: int = 256) -> nn.Module:
    return GPT(*GPT_SIZES[size], vocab, context)


def resnet8(classes: int = 10) -> nn.Module:
    return ResNet8(classes)


MODELS: dict[str, Any] = {"mlp": mlp, "cnn": cnn, "resnet8": resnet8, "vgg6": vgg6, "gpt": gpt}
