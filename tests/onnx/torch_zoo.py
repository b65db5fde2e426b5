"""Networks as PyTorch users write them, small enough to export in a second: every kind of block of the zoo."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def block(i: int, o: int, k: int = 3, s: int = 1, act: type[nn.Module] | None = nn.ReLU, g: int = 1) -> nn.Sequential:
    layers = [nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None, relu: bool = True) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, relu

    def forward(self, x: Tensor) -> Tensor:
        total = self.branch(x) + (x if self.shortcut is None else self.shortcut(x))
        return F.relu(total) if self.relu else total


class Excite(nn.Module):
    def __init__(self, channels: int, gate: type[nn.Module], act: type[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), act(), nn.Conv2d(4, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x)


def inverted(i: int, m: int, o: int, k: int, s: int, act: type[nn.Module], excite: nn.Module | None) -> nn.Module:
    parts = [
        block(i, m, 1, act=act),
        block(m, m, k, s, act, m),
        *([excite] if excite else []),
        block(m, o, 1, act=None),
    ]
    branch = nn.Sequential(*parts)
    return Residual(branch, relu=False) if s == 1 and i == o else branch


def classifier(*features: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def resnet() -> nn.Module:
    down = Residual(nn.Sequential(block(8, 16, s=2), block(16, 16, act=None)), block(8, 16, 1, 2, None))
    same = Residual(nn.Sequential(block(8, 8), block(8, 8, act=None)))
    return classifier(block(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), same, down, width=16)


def resnext() -> nn.Module:
    branch = nn.Sequential(block(16, 8, 1), block(8, 8, g=4), block(8, 16, 1, act=None))
    return classifier(block(3, 16, 7, 2), Residual(branch), width=16)


def mobilenet_v2() -> nn.Module:
    layers = (inverted(8, 24, 8, 3, 1, nn.ReLU6, None), inverted(8, 24, 12, 3, 2, nn.ReLU6, None))
    return classifier(block(3, 8, s=2, act=nn.ReLU6), *layers, nn.Dropout(0.2), width=12)


def mobilenet_v3() -> nn.Module:
    layer = inverted(8, 24, 8, 5, 1, nn.Hardswish, Excite(24, nn.Hardsigmoid, nn.ReLU))
    return classifier(block(3, 8, s=2, act=nn.Hardswish), layer, width=8)


def efficientnet() -> nn.Module:
    layer = inverted(8, 24, 8, 5, 1, nn.SiLU, Excite(24, nn.Sigmoid, nn.SiLU))
    return classifier(block(3, 8, s=2, act=nn.SiLU), layer, width=8)


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(block(8, 8, 1), block(8, 8, act=None, g=8), block(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        joined = torch.cat((left, self.main(right)), dim=1)
        n, c, h, w = joined.size()
        return joined.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


class Fire(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.small, self.large = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.small(x)), F.relu(self.large(x))], 1)


def squeezenet() -> nn.Module:
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), pool, Fire(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1))


class UNet(nn.Module):
    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        self.one, self.two, self.join = block(3, 8), block(8, 16), block(24, 8)
        self.up = (
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            if bilinear
            else nn.ConvTranspose2d(16, 16, 2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        beside = self.one(x)
        return self.join(torch.cat([beside, self.up(self.two(F.max_pool2d(beside, 2)))], 1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.fused, self.causal = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            fused,
            causal,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
            scores = scores if mask is None else scores + mask
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, approximate: str = "none", causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            Attention(width, heads, fused, causal),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 17, 16))
        self.layers, self.head = nn.ModuleList([Encoder(16, 2, True) for _ in range(2)]), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Bert(nn.Module):
    """Token ids and a mask of those that count, as Hugging Face's BERT takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(50, 16), nn.Embedding(32, 16), nn.Embedding(2, 16)
        self.norm = nn.LayerNorm(16, eps=1e-12)
        self.layers = nn.ModuleList([Encoder(16, 2, False) for _ in range(2)])
        self.pooler = nn.Linear(16, 16)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        x = self.norm(self.words(ids) + self.places(places) + self.kinds(torch.zeros_like(ids)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return torch.tanh(self.pooler(x[:, 0]))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.layers, self.norm = nn.ModuleList([Encoder(16, 2, True, "tanh", True) for _ in range(2)]), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.words.weight.T


IMAGES = {
    "resnet": resnet,
    "resnext": resnext,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3": mobilenet_v3,
    "efficientnet": efficientnet,
    "shufflenet": lambda: classifier(block(3, 16, s=2), Shuffle(), Shuffle(), width=16),
    "densenet": lambda: classifier(block(3, 8, 7, 2), Dense(8), Dense(16), nn.AvgPool2d(2), width=24),
    "squeezenet": squeezenet,
    "unet": lambda: UNet(False),
    "unet_bilinear": lambda: UNet(True),
    "vit": ViT,
}
TOKENS = {"bert": Bert, "gpt2": GPT2}


def filled(model: nn.Module) -> nn.Module:
    """In eval mode, with norms that have seen something."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.copy_(torch.randn(layer.running_mean.shape, generator=generator) * 0.1)
            layer.running_var.copy_(torch.rand(layer.running_var.shape, generator=generator) + 0.5)
    return model.eval()
