"""Configurations of the fused-MoE and block-FP8 kernels of serving frameworks (vLLM, SGLang), on any GPU, unmeasured.

Two sets of boosted trees score a configuration from the shape, the device's record and the tile. One was trained to
rank (LambdaRank) on the winners in other people's tuned files, over 31 GPUs; the other to predict the slowdown of our
own kernels, measured on an H200 (`tools/ship_serving.py`). The times decide on GPUs of the H200's architecture, the
winners on all others. Scoring needs NumPy alone. `write_file` writes the choices in vLLM's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._atomic import write_atomic
from tilewise._safetensors import load_arrays
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.gpu.devices import DEVICES, H200, Device, find_device
from tilewise.gpu.families.grouped import SCALE_BLOCK, default_config, search_list
from tilewise.gpu.pinning.ranker import Trees
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.decide import Scores, decide
from tilewise.tune.choose.scores import UNCALIBRATED_GPU

FILE = Path(__file__).parent / "serving_ranker.safetensors"
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # rows of vLLM's files
# Bytes of a weight and of an activation, by the number types in the files' names.
ELEMENT_BYTES = {
    "bf16": (2, 2), "fp8_w8a8": (1, 1), "float8": (1, 1), "int8_w8a8": (1, 1), "int8_w8a16": (1, 2),
    "int4_w4a16": (0.5, 2),
}  # fmt: skip
_NAMES = {"block_m": "BLOCK_SIZE_M", "block_n": "BLOCK_SIZE_N", "block_k": "BLOCK_SIZE_K", "group": "GROUP_SIZE_M",
          "warps": "num_warps", "stages": "num_stages"}  # fmt: skip
# Units of log slowdown per unit of LambdaRank's relevance. On Hopper insensitive between 0 and 0.1 on left-out shapes.
# Elsewhere the winners lead: 0.5 and winners alone differ by 0.1 in first-five hits of single GPUs, with no clear best.
_WINNERS_WEIGHT, _WINNERS_WEIGHT_ELSEWHERE = 0.02, 1.0
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServingShape:
    """One layer of a served model: a fused MoE (`experts` > 0, n the intermediate size) or a block-scaled product."""

    n: int
    k: int = 0  # unknown for a fused MoE
    experts: int = 0
    dtype: str = "bf16"
    block_scaled: bool = False

    def file_name(self, device_name: str) -> str:
        """Return the name under which vLLM looks for this shape's configurations.

        >>> ServingShape(768, experts=128).file_name("NVIDIA H200")
        'E=128,N=768,device_name=NVIDIA_H200.json'
        """
        sizes = f"E={self.experts},N={self.n}" if self.experts else f"N={self.n},K={self.k}"
        dtype = "" if self.dtype == "bf16" else f",dtype={self.dtype}"
        block = f",block_shape=[{SCALE_BLOCK},{SCALE_BLOCK}]" if self.block_scaled else ""
        return f"{sizes},device_name={device_name.replace(' ', '_')}{dtype}{block}.json"


def experts_per_token(experts: int) -> int:
    """Return the usual number of experts per token for a number of experts; tuned files do not state it."""
    return min(experts, 2 if experts <= 16 else 4 if experts <= 62 else 8)


def features(shape: ServingShape, tokens: int, device: Device, configs: Mapping[str, Any]) -> Numbers:
    """Return the trees' features, a row per configuration; `configs` has one column of values per setting."""
    block_m, block_n, block_k, group, warps, stages = (np.asarray(configs[name], np.float64) for name in _NAMES)
    weight_bytes, activation_bytes = ELEMENT_BYTES[shape.dtype]
    # Expected number of experts that receive a token, and rows of each, if tokens choose experts at random.
    rows = tokens * (experts_per_token(shape.experts) if shape.experts else 1)
    active = shape.experts * (1 - (1 - 1 / shape.experts) ** rows) if shape.experts else 1.0
    rows_per_expert = rows / active
    width = 2 * shape.n if shape.experts else shape.n  # gate and up projections are one product
    # The tensor cores' rate for this size of numbers; that of other types or a guess where none is known.
    names = ("fp8", "int8", "fp16") if activation_bytes == 1 else ("fp16", "fp8", "int8")
    rate = next((device.tensor_flops[dtype] for dtype in names if dtype in device.tensor_flops), 1e14)
    name = device.architecture.name
    of_problem = (
        np.log2(tokens), np.log2(shape.experts or 1), np.log2(shape.n), np.log2(shape.k or 1), shape.experts > 0,
        shape.block_scaled, weight_bytes, activation_bytes, np.log2(rows_per_expert), np.log2(rows),
        float(name.startswith("gfx")), device.multiprocessors, device.shared_bytes_per_block / 1024,
        device.memory_bandwidth / 1e9, rate / 1e12, rate / device.memory_bandwidth, device.architecture.max_warps,
        float(name[3:]) if name.startswith("sm_") else 0.0,
    )  # fmt: skip

    # Work per tile, and how evenly the tiles fill the multiprocessors.
    programs = active * np.ceil(rows_per_expert / block_m) * np.ceil(width / block_n)
    waves = programs / device.multiprocessors
    stage_bytes = (block_m * activation_bytes + block_n * weight_bytes) * block_k
    of_configs = [
        np.log2(block_m), np.log2(block_n), np.log2(block_k), np.log2(block_m * block_n), np.log2(block_m * block_k),
        np.log2(block_n * block_k), np.log2(waves), waves / np.ceil(waves),
        stage_bytes / device.shared_bytes_per_block, np.log2(rows_per_expert / block_m), np.log2(width / block_n),
        block_m * np.ceil(rows_per_expert / block_m) / rows_per_expert,
        np.log2(block_m * block_n * block_k / stage_bytes), np.log2((shape.k or 4096) / block_k),
        group, warps, stages, stage_bytes * stages / device.shared_bytes_per_block,
        np.log2(block_m * block_n / warps), np.log2(waves / group),
    ]  # fmt: skip
    table = np.empty((len(block_m), len(of_problem) + len(of_configs)))
    table[:, : len(of_problem)] = of_problem
    table[:, len(of_problem) :] = np.stack(of_configs, axis=1)
    return table


def candidates(shape: ServingShape, device: Device, default: Config) -> tuple[Config, ...]:
    """List the configurations of vLLM's search list that fit a device, the default first."""
    amd = device.architecture.name.startswith("gfx")
    return _fitting(amd, device.shared_bytes_per_block, ELEMENT_BYTES[shape.dtype], shape.block_scaled, default)


@lru_cache(maxsize=32)
def _fitting(
    amd: bool, shared_bytes: int, element_bytes: tuple[float, float], block_scaled: bool, default: Config
) -> tuple[Config, ...]:
    """List the configurations of vLLM's search whose tiles fit into shared memory."""
    block_ks = (64, 128) if block_scaled else (64, 128, 256)
    configs: Sequence[Config] = search_list((32, 64, 128, 256), block_ks, default)
    if amd:
        axes = ((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (32, *block_ks), (1, 4, 8, 16, 32), (1, 2, 4, 8), (2,))
        configs = [Config(dict(zip(_NAMES, values, strict=True))) for values in product(*axes)]

    def fits(config: Config) -> bool:
        tile = config.size("block_m") * element_bytes[1] + config.size("block_n") * element_bytes[0]
        return tile * config.size("block_k") * max(config.size("stages") - 1, 1) <= shared_bytes

    return (default, *(config for config in configs if config != default and fits(config)))


class ServingRanker:
    """Ranks configurations of serving kernels by trained regression trees."""

    def __init__(self, path: Path = FILE) -> None:
        """Read the trees from a model file."""
        arrays, _ = load_arrays(path)
        try:
            self._winners, self._times = Trees(arrays, "winners"), Trees(arrays, "times")
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} is not a ranker of serving kernels: it lacks {error}.") from error

    def scores(self, shape: ServingShape, tokens: int, device: Device, configs: Sequence[Config]) -> Numbers:
        """Return a score per configuration of a layer's `shape` for this number of tokens; lower is faster."""
        columns = {name: [config.size(name) for config in configs] for name in _NAMES}
        rows = features(shape, tokens, device, columns)
        # Measured times lead on Hopper GPUs, where they were measured; the winners of the tuned files lead elsewhere.
        is_hopper = device.architecture is H200.architecture
        weight = _WINNERS_WEIGHT if is_hopper else _WINNERS_WEIGHT_ELSEWHERE
        return self._times.predict(rows) - weight * self._winners.predict(rows)

    def choose(self, shape: ServingShape, tokens: int, device: Device) -> Config:
        """Return the configuration that is predicted fastest for this number of tokens."""
        default = default_config(tokens, shape.experts, shape.block_scaled)
        configs = candidates(shape, device, default)
        scores = Scores(UNCALIBRATED_GPU, self.scores(shape, tokens, device, configs))
        sizes = {"n": shape.n, "k": shape.k, "experts": shape.experts, "m": tokens}
        return decide(Problem.of("serving", dtype=shape.dtype, **sizes), configs, scores).config

    def first_tiles(self, shape: ServingShape, tokens: int, device: Device, count: int = 5) -> list[Config]:
        """Return the best-ranked configuration of each of the `count` best-ranked tile sizes."""
        configs = candidates(shape, device, default_config(tokens, shape.experts, shape.block_scaled))
        best: dict[tuple[int, ...], Config] = {}
        for index in np.argsort(self.scores(shape, tokens, device, configs), kind="stable"):
            config = configs[index]
            best.setdefault(tuple(config.size(name) for name in ("block_m", "block_n", "block_k")), config)
            if len(best) == count:
                break
        return list(best.values())


@lru_cache(maxsize=1)
def shipped_serving_ranker() -> ServingRanker:
    """Load the ranker that is installed with tilewise."""
    return ServingRanker()


def device_named(name: str) -> Device:
    """Return the record of a device; raise `ConfigurationError`, listing the known names, if there is none."""
    device = find_device(name.replace("_", " "))
    if device is None:
        names = ", ".join(device.name for device in DEVICES)
        raise ConfigurationError(f"there is no record of a GPU called {name!r}; there are {names}")
    return device


def file_row(config: Config, shape: ServingShape, device: Device) -> dict[str, int]:
    """Convert a configuration to an entry of vLLM's tuned file.

    On AMD with the settings that most tuned files agree on.
    """
    row = {_NAMES[name]: config.size(name) for name in _NAMES}
    if device.architecture.name.startswith("gfx"):
        row |= {"matrix_instr_nonkdim": 16, "kpack": 1} | ({"waves_per_eu": 0} if shape.experts else {})
    return row


def write_file(shape: ServingShape, device_name: str, out: Path, tokens: Sequence[int] = TOKENS) -> Path:
    """Choose a configuration for every number of tokens and write vLLM's file: to `out`, or into the folder `out`."""
    device, ranker = device_named(device_name), shipped_serving_ranker()
    rows = {str(count): file_row(ranker.choose(shape, count, device), shape, device) for count in tokens}
    path = out if out.suffix == ".json" else out / shape.file_name(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(rows, indent=4) + "\n").encode())
    return path
