"""Device cards: what is known of the hardware that a collection was measured on, as a few numbers.

A card is a JSON object, `{"A100": {"vendor": "nvidia", "multiprocessors": 108, ...}}` in the `devices.json` beside a
collection's `schema.json`. Every field may be missing, and fields that are not known here are kept. The well-known GPUs
below are from their makers' data sheets: whole devices, but one die of an MI250X, which is what a kernel runs on.

A card can enter a collection as columns too (`tiles import --device-columns`), `device_*`, the same in all
configurations of a kernel. Rates enter as ratios where they are ratios: what decides is how much arithmetic a device
does for each byte it loads, not how fast it is. It is no default: models of a few devices learn them by heart and
choose worse for another (`benchmarks.devices`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.errors import FileFormatError

Card = dict[str, Any]

DEVICES_FILE = "devices.json"
# What the fields say. Of a multiprocessor (a compute unit at AMD): lanes, threads, registers, shared memory, L1.
FIELDS: dict[str, str] = {
    "vendor": "nvidia, amd, intel or another word",
    "multiprocessors": "streaming multiprocessors or compute units; cores of a CPU",
    "clock_mhz": "boost clock",
    "lanes": "float32 multiply-adds a cycle",
    "warp": "threads that run in step",
    "threads": "most threads resident at once",
    "registers_kib": "register file",
    "shared_kib": "most shared memory",
    "l1_kib": "first-level cache",
    "l2_kib": "second-level cache of the device",
    "bandwidth_gbs": "memory bandwidth, GB/s",
    "tensor_tflops": "dense float16 matrix products, TFLOP/s",
}
_VENDORS = ("nvidia", "amd", "intel")
_MOST_DEVICES, _MOST_FIELDS = 1000, 100


def _card(vendor: str, *numbers: float) -> Card:
    return {"vendor": vendor, **dict(zip(list(FIELDS)[1:], numbers, strict=True))}


KNOWN: dict[str, Card] = {
    #                  SMs clock lanes warp thr. regs shared L1  L2 KiB   GB/s  tensor
    "A100": _card("nvidia", 108, 1410, 64, 32, 2048, 256, 164, 192, 40_960, 1555, 312),
    "A4000": _card("nvidia", 48, 1560, 128, 32, 1536, 256, 100, 128, 4_096, 448, 77),
    "A6000": _card("nvidia", 84, 1800, 128, 32, 1536, 256, 100, 128, 6_144, 768, 155),
    "H100": _card("nvidia", 132, 1980, 128, 32, 2048, 256, 228, 256, 51_200, 3350, 989),
    "H200": _card("nvidia", 132, 1980, 128, 32, 2048, 256, 228, 256, 51_200, 4800, 989),
    "MI250X": _card("amd", 110, 1700, 64, 64, 2048, 512, 64, 16, 8_192, 1638, 192),
    "W6600": _card("amd", 28, 2903, 64, 32, 1024, 256, 64, 16, 2_048, 224, 21),
    "W7800": _card("amd", 70, 2499, 128, 32, 1024, 384, 64, 32, 6_144, 576, 90),
}

# The columns, and how each comes from a card. A ratio is unknown where one of its numbers is.
_PLAIN = ("warp", "lanes", "multiprocessors", "clock_mhz", "threads", "registers_kib", "shared_kib", "l1_kib", "l2_kib")
_RIDGE = ("device_ridge", "device_tensor_ridge")
DEVICE_COLUMNS = ("device_vendor", *(f"device_{name}" for name in _PLAIN), *_RIDGE)


def find_card(name: str) -> Card:
    """The card of a well-known device whose name is a word of `name`, else an empty one.

    >>> find_card("NVIDIA A100-PCIE-40GB")["multiprocessors"]
    108
    """
    found = known_name(name)
    return dict(KNOWN[found]) if found else {}


def known_name(text: str) -> str:
    """The first word of `text` that names a device of the table, as the table spells it; "" where none does."""
    words = {word.upper(): None for word in re.split(r"[^A-Za-z0-9]+", text)}
    return next((name for name in KNOWN if name.upper() in words), "")


def columns_of(card: Mapping[str, Any]) -> tuple[float, ...]:
    """The values of `DEVICE_COLUMNS`; 0 where nothing is known."""
    known = {name: _number(card.get(name)) for name in FIELDS if name != "vendor"}
    vendor = str(card.get("vendor", "")).lower()
    place = 1.0 + _VENDORS.index(vendor) if vendor in _VENDORS else 0.0
    flops = 2e6 * known["lanes"] * known["multiprocessors"] * known["clock_mhz"]
    ridges = (_ratio(flops, 1e9 * known["bandwidth_gbs"]), _ratio(1e3 * known["tensor_tflops"], known["bandwidth_gbs"]))
    return (place, *(known[name] for name in _PLAIN), *ridges)


def _number(value: Any) -> float:
    """A finite number above zero, else 0."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and 0 < value < 1e12 and math.isfinite(value) else 0.0


def _ratio(above: float, below: float) -> float:
    return above / below if above and below else 0.0


def read_cards(path: Path) -> dict[str, Card]:
    """The cards in a JSON file, by the devices' names; a card need not say anything.

    The words and numbers are not believed: what is no number above zero counts as unknown.
    """
    content = read_json_input(path)
    if not isinstance(content, dict) or not all(isinstance(card, dict) for card in content.values()):
        raise FileFormatError(f'{path} must hold cards by name, such as {{"A100": {{"multiprocessors": 108}}}}.')
    if len(content) > _MOST_DEVICES or any(len(card) > _MOST_FIELDS for card in content.values()):
        raise FileFormatError(f"{path} holds more than {_MOST_DEVICES} devices, or {_MOST_FIELDS} fields of one.")
    return {str(name): dict(card) for name, card in content.items()}
