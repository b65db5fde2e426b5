"""Reads the tuned Triton configurations of vLLM and SGLang: one JSON file per shape and GPU, one winner per batch size.

The shape and the device are in the file's name (``E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8.json``); the file
maps a number of tokens to the fastest configuration that the tool found. No times are stored. The winner is therefore
compared with other configurations of the tool's search list: all tiles with the winner's other settings, and the
winner's tile with each other setting changed. As a collection, the winner has the runtime 1 and all others have 2.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tilewise.costmodel.data.importers.record import (
    MAX_VALUES,
    BadRecordError,
    LogRecord,
    Skip,
    Value,
    check_text,
    flat_values,
)
from tilewise.costmodel.data.importers.stream import JsonWalker, Source

RUNTIME_NOTE = "rank, not a time: 1 for the tuned configuration, 2 for others of the tool's search list"
# Families by the sizes that a file's name has, and the names of these sizes in a record.
_FAMILIES = {
    "fused_moe": {"E": "experts", "N": "n"},
    "block_fp8": {"N": "n", "K": "k"},
    "selective_state_update": {"headdim": "head", "dstate": "state"},
}
TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
# Search lists of the tools' benchmark scripts. AMD's lists have settings that NVIDIA's compiler does not know.
_NVIDIA = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256), "BLOCK_SIZE_N": (32, 64, 128, 256), "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5),
}  # fmt: skip
_AMD = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256), "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256), "GROUP_SIZE_M": (1, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8),
    "num_stages": (2,), "waves_per_eu": (0, 1, 2, 4), "matrix_instr_nonkdim": (16, 32), "kpack": (1, 2),
}  # fmt: skip
_STATE_UPDATE = {"BLOCK_SIZE_M": (4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8)}
_COLLECTION_NAMES = {"num_warps": "warps", "num_stages": "stages", "GROUP_SIZE_M": "group"}  # of tilewise's collections
_MAX_SIZE = 1 << 24  # of a size, a number of tokens or a setting


class TunedRow(NamedTuple):
    """The winner of one batch size: `sizes` include the number of tokens (m) and the number type."""

    family: str
    sizes: Mapping[str, Value]
    device: str
    config: Mapping[str, int]
    triton: str = ""  # version of Triton, if the file says it


def read_rows(source: Source, skip: Skip) -> Iterator[TunedRow]:
    """Yield the rows of one file; rows and files that cannot be used are skipped with a reason."""
    walker, rows = JsonWalker(source), dict[str, Any]()
    if walker.next_char() != "{":  # archives hold licences and notes too
        return skip("a file that is not a JSON object")
    for member in walker.members():
        rows[member[:40]] = walker.value()
        if len(rows) > MAX_VALUES:
            return skip(f"a file with more than {MAX_VALUES} rows")
    try:
        family, sizes, device = parse_file_name(source.name)
    except BadRecordError as error:
        return skip(str(error))
    # Newer files name Triton's version among the batch sizes.
    version = rows.pop("triton_version", "")
    for tokens, config in rows.items():
        try:
            yield TunedRow(family, {"m": _tokens(tokens), **sizes}, device, _settings(config), str(version)[:40])
        except BadRecordError as error:
            skip(str(error))


def parse_file_name(name: str) -> tuple[str, dict[str, Value], str]:
    """Return the family, the sizes and the device that a tuned file's name states.

    >>> parse_file_name("E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json")
    ('fused_moe', {'experts': 8.0, 'n': 7168.0, 'dtype': 'fp8_w8a8', 'block_0': 128.0, 'block_1': 128.0}, 'NVIDIA_H200')
    """
    text = name.rpartition("/")[2].removesuffix(".json")
    text = re.sub(r"\[(\d{1,6}), *(\d{1,6})\]", r"\1x\2", text)  # commas separate the entries of the name
    entries = dict(entry.split("=", 1) for entry in text.split(",") if "=" in entry)
    device = entries.pop("device_name", "")
    for family, names in _FAMILIES.items():
        if names.keys() <= entries.keys():
            sizes: dict[str, Any] = {names[key]: entries.pop(key) for key in names}
            if not device or not all(size.isdecimal() and 0 < int(size) < _MAX_SIZE for size in sizes.values()):
                break
            # Entries that no family names, such as block_shape, stay as sizes of the record.
            block = entries.pop("block_shape", None)
            sizes |= {"dtype": entries.pop("dtype", entries.pop("cache_dtype", "bf16"))} | entries
            if block is not None:
                sizes["block"] = block.split("x")
            return family, dict(flat_values(sizes)), check_text(device, 100)
    raise BadRecordError("a file whose name does not state sizes and device, as in E=8,N=7168,device_name=NVIDIA_H200")


def _tokens(key: str) -> float:
    """Parse the key of a row, the number of tokens (m of the product)."""
    if not key.isdecimal() or not 0 < int(key) < _MAX_SIZE:
        raise BadRecordError("a row whose name is not a number of tokens")
    return float(key)


def _settings(config: Any) -> Mapping[str, int]:
    """Return a row's settings by name; raise `BadRecordError` unless they are integers of a Triton kernel."""
    if not isinstance(config, Mapping) or "BLOCK_SIZE_M" not in config:
        raise BadRecordError("a row without BLOCK_SIZE_M")
    if not all(type(value) is int and 0 <= value < _MAX_SIZE for value in config.values()) or len(config) > 20:
        raise BadRecordError("a row with a setting that is not a small integer")
    return {check_text(name, 40): value for name, value in config.items()}


def alternatives(row: TunedRow) -> Iterator[Mapping[str, int]]:
    """Yield the configurations that lost against a tuned winner, from the tool's search list.

    They have another tile with the winner's other settings, or the winner's tile with one setting changed.
    """
    amd = "AMD" in row.device or "Radeon" in row.device
    choices = _STATE_UPDATE if row.family == "selective_state_update" else _AMD if amd else _NVIDIA
    tile = [name for name in TILE if name in row.config and name in choices]
    # All other tiles with the winner's settings, then the winner's tile with one setting changed.
    for values in itertools.product(*(choices[name] for name in tile)):
        if any(row.config[name] != value for name, value in zip(tile, values, strict=True)):
            yield {**row.config, **dict(zip(tile, values, strict=True))}
    for name in row.config.keys() & choices.keys() - set(tile):
        yield from ({**row.config, name: value} for value in choices[name] if value != row.config[name])


def read_records(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield each tuned winner as a record with runtime 1 ns, and the configurations that lost against it with 2 ns."""
    for row in read_rows(source, skip):
        for runtime_ns, configs in ((1.0, (row.config,)), (2.0, alternatives(row))):
            for config in configs:
                settings = {_COLLECTION_NAMES.get(name, name): value for name, value in config.items()}
                yield LogRecord(row.family, row.sizes, flat_values(settings), (runtime_ns,), device=row.device)
