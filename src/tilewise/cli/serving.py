"""`tilewise tune moe` and `block-fp8`: files of configurations for vLLM, written without measuring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.errors import ConfigurationError

_MAX_SIZE = 9_999_999  # a bound on input, far above any network: sizes have at most seven digits


def write_serving_files(
    what: str,
    sizes: Mapping[str, Any],
    *,
    block_scaled: bool,
    device_name: str | None,
    batch_sizes: str | None,
    out: Path,
) -> dict[str, Any]:
    """Write one of vLLM's tuned files per shape; return their paths and which device record was used."""
    from tilewise.gpu.serving import ELEMENT_BYTES, TOKENS, ServingShape, device_named, write_file

    name = device_name or _this_gpu()
    dtype = sizes["dtype"] or ("bf16" if what == "moe" else "fp8_w8a8")
    if dtype not in ELEMENT_BYTES:
        raise ConfigurationError(f"--dtype is one of {', '.join(ELEMENT_BYTES)}, not {dtype!r}.")
    if max([sizes["experts"], *(sizes["intermediate"] or [])]) > _MAX_SIZE:
        raise ConfigurationError(f"--experts and --intermediate are at most {_MAX_SIZE:,}.")
    if what == "moe":
        if not sizes["intermediate"]:
            raise ConfigurationError("tune moe needs --intermediate, the intermediate size of a layer on one GPU.")
        shapes = [ServingShape(n, 0, sizes["experts"], dtype, block_scaled) for n in sizes["intermediate"]]
    else:
        match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", sizes["shape"] or "")
        if match is None:
            raise ConfigurationError("the sizes of block-fp8 are n x k, such as 4096x7168")
        shapes = [ServingShape(int(match[1]), int(match[2]), 0, dtype, block_scaled=True)]
    if out.suffix == ".json" and len(shapes) > 1:
        raise ConfigurationError(f"{out} is one file for {len(shapes)} shapes; give a folder.")
    tokens = _parse_tokens(batch_sizes) if batch_sizes else TOKENS
    device = device_named(name)
    paths = [write_file(shape, name, out.expanduser(), tokens) for shape in shapes]
    return {"files": [str(path) for path in paths], "device": device.name, "source": device.source}


def _parse_tokens(text: str) -> list[int]:
    """Parse a comma-separated list of positive numbers; return them sorted, each once."""
    counts = [int(word) if re.fullmatch(r" *\d{1,7} *", word) else 0 for word in text.split(",")]
    if not all(counts):
        raise ConfigurationError(f"--batch-sizes is a list of numbers of tokens, such as 1,16,256, not {text!r}.")
    return sorted(set(counts))


def _this_gpu() -> str:
    """Return the name that PyTorch reports for the first GPU."""
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]
    if torch is None or not torch.cuda.is_available():
        raise ConfigurationError(
            "there is no GPU here: name the one that the file is for, as in --device-name NVIDIA_H200"
        )
    return str(torch.cuda.get_device_name(0))
