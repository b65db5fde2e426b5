"""Networks of the zoo and the reference models with weights trained on MNIST, for benchmarks.int8_accuracy: no command.

Images become what those networks take, at a size that trains in minutes: a frame of two zeros, the mean of every two by
two pixels, three equal channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

import tilewise
from tilewise import Tensor, data, models, optim
from tilewise.models import zoo
from tilewise.nn import Module, functional

NETWORKS = ("vgg6", "resnet8", "mobilenet_v2")
_BATCH = 32
_STEPS = 800
_RATE = 3e-3


def train_network(name: str, seed: int) -> Module:
    make: Any = zoo.ZOO[name] if name in zoo.ZOO else getattr(models, name)
    return cast(Module, make(classes=10, seed=seed))


def as_pictures(x: np.ndarray) -> np.ndarray:
    """(N, 1, 28, 28) to (N, 3, 16, 16)."""
    framed = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2))).reshape(len(x), 1, 16, 2, 16, 2)
    return np.ascontiguousarray(framed.mean((3, 5), dtype=np.float32).repeat(3, 1))


def trained_network(name: str, images: data.ImageData, folder: Path, seed: int) -> Module:
    """The network with its weights from the folder, where they are after the first time."""
    network, weights = train_network(name, seed), folder / f"{name}-{seed}.safetensors"
    if weights.is_file():
        network.load_state_dict(tilewise.load(weights))
        return network.eval()
    _train(network.train(), images, np.random.default_rng(seed))
    folder.mkdir(parents=True, exist_ok=True)
    tilewise.save(network, weights)
    return network.eval()


def _train(network: Module, images: data.ImageData, rng: np.random.Generator) -> None:
    optimizer = optim.Adam(network.parameters(), lr=_RATE)
    order = rng.permutation(len(images.x_train))
    for step in range(_STEPS):
        at = order[step * _BATCH : (step + 1) * _BATCH]
        optimizer.lr = optim.cosine_schedule(step, _STEPS, _RATE, warmup=_STEPS // 10)
        loss = functional.cross_entropy(network(Tensor(as_pictures(images.x_train[at]))), Tensor(images.y_train[at]))
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(network.parameters(), 1.0)
        optimizer.step()
