"""choose the configuration of a Triton kernel with tilewise.tune.triton.autotune

Triton and PyTorch's CUDA queries are stand-ins, so that the job runs without a GPU.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from tilewise.tune.triton import autotune


class Autotuner:
    """The part of triton.runtime.autotuner.Autotuner that a launch needs; every launch takes one microsecond."""

    def __init__(self, fn: Any, arg_names: Any, configs: Any, key: Any, *more: Any, **options: Any) -> None:
        self.base_fn, self.arg_names, self.configs, self.keys, self.cache = fn, arg_names, configs, key, {}

    def run(self, *args: Any, **kwargs: Any) -> None: ...

    def pre_hook(self, *args: Any, **kwargs: Any) -> None: ...

    def prune_configs(self, kwargs: Any) -> Any:
        return self.configs

    def _bench(self, *args: Any, **kwargs: Any) -> list[float]:
        return [1e-3]


def stand_in(name: str, **contents: Any) -> ModuleType:
    """Enter a module with the given contents into sys.modules."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def product(a: Any, M: int, N: int, K: int) -> None:
    """Stand for a jitted matrix product."""


class LaunchConfig:
    """The part of triton.Config that a launch needs."""

    num_warps, num_stages = 4, 3

    def __init__(self, block_n: int) -> None:
        self.kwargs = {"BLOCK_M": 64, "BLOCK_N": block_n, "BLOCK_K": 64}

    def all_kwargs(self) -> dict[str, int]:
        return self.kwargs


def run() -> None:
    """Install the stand-ins and launch a decorated kernel once."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda device: gpu
    )
    stand_in("torch", cuda=cuda, are_deterministic_algorithms_enabled=lambda: False)
    autotuner = stand_in("triton.runtime.autotuner", Autotuner=Autotuner)
    stand_in("triton", __version__="3.0.0", runtime=stand_in("triton.runtime", autotuner=autotuner))
    product.arg_names = ["a", "M", "N", "K"]  # type: ignore[attr-defined]
    tuned = autotune([LaunchConfig(32), LaunchConfig(64), LaunchConfig(128)], ["M", "N", "K"])(product)
    tuned.run(SimpleNamespace(dtype="torch.bfloat16"), 512, 512, 512)
    assert tuned.cache
