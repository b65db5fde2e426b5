"""Attention networks: ViT-tiny on images, and a small BERT on tokens."""

from __future__ import annotations

import numpy as np

from tilewise import nn
from tilewise.errors import ConfigurationError
from tilewise.models.zoo.blocks import Rng
from tilewise.nn.layers import Rng as Seed
from tilewise.nn.layers import uniform
from tilewise.tensor import Tensor, TensorLike, cat


class VisionTransformer(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2021): image patches as tokens, plus a class token."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int, classes: int, rng: Rng) -> None:
        """Create the patch embedding, the blocks and the classifier."""
        if size % patch:
            raise ConfigurationError(f"the image size {size} must be a multiple of the patch size {patch}")
        self.example_shape = (3, size, size)
        self.patches = nn.Conv2d(3, width, patch, patch, rng=rng)
        self.class_token = uniform(rng, (1, 1, width), 0.1)
        self.positions = uniform(rng, (1, (size // patch) ** 2 + 1, width), 0.1)
        self.blocks = nn.ModuleList(*(nn.TransformerBlock(width, heads, causal=False, rng=rng) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (N, 3, H, W)."""
        images: Tensor = self.patches(x)  # (N, C, h, w)
        n, c, h, w = images.shape
        tokens = images.reshape(n, c, h * w).permute(0, 2, 1)  # (N, T, C)
        x = cat([self.class_token.expand(n, 1, c), tokens], axis=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def vit_tiny(size: int = 224, classes: int = 1000, seed: Seed = 0) -> VisionTransformer:
    """Build ViT-Ti/16: 12 layers of width 192, 5.7 million parameters."""
    rng = np.random.default_rng(seed)
    return VisionTransformer(size, patch=16, width=192, layers=12, heads=3, classes=classes, rng=rng)


class EncoderLayer(nn.Module):
    """Encoder layer of BERT: attention and two linear layers, each with a residual followed by a norm."""

    def __init__(self, width: int, heads: int, rng: Rng) -> None:
        """Create the layers with random weights."""
        self.attention = nn.MultiHeadAttention(width, heads, rng=rng)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.linear1 = nn.Linear(width, 4 * width, rng=rng)
        self.linear2 = nn.Linear(4 * width, width, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and a GELU network to tokens (N, T, width), each followed by sum and layer norm."""
        x = self.norm1(x + self.attention(x))
        hidden: Tensor = self.linear1(x)
        out: Tensor = self.norm2(x + self.linear2(hidden.gelu()))
        return out


class Bert(nn.Module):
    """BERT (Devlin et al. 2019): token ids (N, T) to hidden states (N, T, width)."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int, rng: Rng) -> None:
        """Create the embeddings and encoder layers with random weights."""
        self.vocab, self.context, self.example_shape = vocab, context, (min(context, 128),)
        self.tokens = nn.Embedding(vocab, width, rng)
        self.places = nn.Embedding(context, width, rng)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(*(EncoderLayer(width, heads, rng) for _ in range(layers)))

    def forward(self, ids: TensorLike) -> Tensor:
        """Encode token ids (N, T) into vectors (N, T, width)."""
        tokens = ids if isinstance(ids, Tensor) else Tensor(np.asarray(ids))
        x: Tensor = self.norm(self.tokens(tokens) + self.places(np.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return x


def bert_small(vocab: int = 30522, context: int = 512, seed: Seed = 0) -> Bert:
    """Build a BERT with 4 layers of width 512 and 8 heads: 28.5 million parameters."""
    rng = np.random.default_rng(seed)
    return Bert(layers=4, width=512, heads=8, vocab=vocab, context=context, rng=rng)
