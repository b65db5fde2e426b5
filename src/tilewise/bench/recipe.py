"""Recipes: what a closed entry does to the shipped model, as a short list of steps in JSON and nothing else.

    {"tilewise": 1, "event": "CNN_MARATHON",
     "steps": [{"step": "backend", "name": "native"}, {"step": "quantize", "samples": 512}]}

A recipe holds no code and no numbers of its own making: every key is known, every value is checked against a range,
and a file it names must lie in its own folder.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tilewise._files import convert_read_errors, open_input, read_input
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.jsontext import MOST_BYTES, canonical, parse_json
from tilewise.errors import ConfigurationError, Rejected

MOST_STEPS = 16
MOST_FILE_BYTES = 8 << 20
FORMAT = 1


@dataclass(frozen=True)
class Step:
    """One optimization with its parameters, defaults filled in."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        options_text = ", ".join(
            f"{key} {_option_text(value)}" for key, value in self.options.items() if value not in (None, (), [])
        )
        return f"{self.name} ({options_text})" if options_text else self.name


@dataclass(frozen=True)
class Recipe:
    """A checked recipe, the text it came from, and the folder that its files lie in."""

    event: Event
    steps: tuple[Step, ...]
    name: str = ""
    predictions: str = ""  # TILE_OLYMPIAD has a file of predictions in place of steps
    folder: Path | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe in the form of its JSON file."""
        head = {"tilewise": FORMAT, "event": self.event.name, "name": self.name}
        if self.event.kind == "tiles":
            return head | {"predictions": self.predictions}
        steps = [{"step": step.name, **_plain(step.options)} for step in self.steps]
        return head | {"steps": steps}

    @property
    def files(self) -> list[str]:
        names = [step.options["file"] for step in self.steps if step.options.get("file")]
        return [*names, self.predictions] if self.predictions else names

    def read_file(self, name: str) -> Path:
        """Return the path of a file that the recipe names; the file must be in the recipe's folder."""
        return file_inside(self.folder, name)

    def file_content(self, name: str) -> bytes:
        return read_input(self.read_file(name), MOST_FILE_BYTES)

    def digest(self) -> str:
        """Return the SHA-256 of the recipe and of the contents of its files."""
        seal = hashlib.sha256(canonical(self.as_dict()))
        for name in self.files:
            seal.update(hashlib.sha256(self.file_content(name)).digest())
        return seal.hexdigest()


def read_recipe(path: str | Path) -> Recipe:
    """Read the recipe in a file; the files it names are in the same folder."""
    where = Path(path)
    with open_input(where, MOST_FILE_BYTES) as stream, convert_read_errors(where):
        content = stream.read(MOST_BYTES + 1)
    try:
        return parse_recipe(content, where.parent)
    except Rejected as error:
        raise Rejected(error.code, f"{where}: {error}") from None


def parse_recipe(source: bytes | str | Mapping[str, Any], folder: Path | None = None) -> Recipe:
    """Parse a recipe from JSON text or from parsed data; raise Rejected for an unknown, missing or invalid field."""
    content = dict(source) if isinstance(source, Mapping) else parse_json(source)
    if not isinstance(content, dict):
        raise Rejected("schema", "a recipe is a JSON object with an event and steps")
    if content.get("tilewise") != FORMAT or isinstance(content.get("tilewise"), bool):
        raise Rejected("schema", f'a recipe starts with "tilewise": {FORMAT}, the version of this format')
    try:
        event = TinyMLPerf.event(_checked_text(content.get("event"), "event"))
    except ConfigurationError as error:
        raise Rejected("schema", str(error)) from None
    body = "predictions" if event.kind == "tiles" else "steps"
    unknown = content.keys() - {"tilewise", "event", "name", body}
    if unknown:
        raise Rejected("schema", _unknown_key(sorted(unknown)[0], body))
    name = _checked_text(content.get("name", ""), "name")
    if event.kind == "tiles":
        return Recipe(event, (), name, _file(content.get("predictions"), "predictions"), folder)
    steps = content.get("steps")
    if not isinstance(steps, list) or not 1 <= len(steps) <= MOST_STEPS:
        raise Rejected("schema", f"a recipe has 1 to {MOST_STEPS} steps")
    recipe = Recipe(event, tuple(_parse_step(entry, at) for at, entry in enumerate(steps, 1)), name, folder=folder)
    _check_order(recipe)
    return recipe


_CLAIMS = {"score", "speedup", "latency", "accuracy", "memory", "size", "p50", "result", "results", "measurements"}


def _unknown_key(key: str, body: str) -> str:
    """Return why a recipe must not have this key; `body` is the name of the field with its steps or plugin."""
    if key.lower() in _CLAIMS:
        return f"a recipe brings no figures of its own, and this one states {key[:40]!r}: the harness measures them"
    return f"a recipe has no field {key[:40]!r}; it has tilewise, event, name and {body}"


# --- files ---


def check_name(name: str) -> str:
    """Check a file name in a recipe: relative, without `..`, with ordinary characters."""
    path = PurePosixPath(name)
    plain = all(part not in ("..", ".", "") for part in name.split("/"))
    if path.is_absolute() or not plain or "\\" in name or ":" in name or "\0" in name:
        raise Rejected("file outside", f"the recipe names {name[:80]!r}, which is not a file inside its own folder")
    return name


def file_inside(folder: Path | None, name: str) -> Path:
    """Return the path of file `name` in `folder`; reject one that a link leads out of the folder."""
    check_name(name)
    if folder is None:
        raise Rejected("file missing", f"the recipe names the file {name!r} but was sent without a folder")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):  # links that lead in a circle
        raise Rejected("file missing", f"the recipe names the file {name!r}, whose links form a cycle") from None
    if not path.is_relative_to(root):
        raise Rejected("file outside", f"{name!r} points outside the recipe's folder")
    if not path.is_file():
        raise Rejected("file missing", f"the recipe names the file {name!r}, which is not in its folder")
    if path.stat().st_size > MOST_FILE_BYTES:
        raise Rejected("too large", f"{name!r} is larger than the {MOST_FILE_BYTES:,} bytes allowed")
    return path


# --- steps ---

Check = Callable[[Any, str], Any]
_MOST_MARKS = 3  # accents on one letter


def _checked_text(value: Any, what: str, most: int = 80) -> str:
    """Return the value if it is printable text of at most `most` characters; otherwise reject `what`, its field."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise Rejected("schema", f"{what} must be a string of at most {most} printable characters")
    if any(all(map(unicodedata.combining, value[at : at + _MOST_MARKS + 1])) for at in range(len(value) - _MOST_MARKS)):
        raise Rejected("schema", f"{what} has more than {_MOST_MARKS} combining marks on one letter")
    return value


def _one_of(*names: str) -> Check:
    """Return a check that a value is one of these names."""

    def check(value: Any, what: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise Rejected("schema", f"{what} must be one of {', '.join(names)}")
        return value

    return check


def _whole_number(low: int, high: int) -> Check:
    """Return a check that a value is an integer in [low, high]."""

    def check(value: Any, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Rejected("schema", f"{what} must be a whole number from {low} to {high}")
        return value

    return check


def _checked_fraction(value: Any, what: str) -> float:
    """Return the value as a float in [0, 1); otherwise reject the recipe, naming the field `what`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1
    if not good:
        raise Rejected("schema", f"{what} must be a number from 0 up to, but not including, 1")
    return float(value)


def _checked_bool(value: Any, what: str) -> bool:
    """Return the value if it is a bool; otherwise reject the recipe, naming the field `what`."""
    if not isinstance(value, bool):
        raise Rejected("schema", f"{what} must be true or false")
    return value


def _checked_names(value: Any, what: str) -> tuple[str, ...]:
    """Return a list of at most 32 short texts as a tuple; otherwise reject the recipe, naming the field `what`."""
    if not isinstance(value, list | tuple) or len(value) > 32:
        raise Rejected("schema", f"{what} must be a list of at most 32 names")
    return tuple(_checked_text(item, what) for item in value)


def _file(value: Any, what: str) -> str:
    return check_name(_checked_text(value, what, most=200))


def _checked_tiles(value: Any, what: str) -> tuple[dict[str, Any], ...]:
    """Check a list of tiles, each {"shape": [m, n, k], "layout": "nt", "tile": {...}}; return it as a tuple."""
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= 64:
        raise Rejected("schema", f"{what} must be a list of 1 to 64 tiles")
    return tuple(_checked_tile(entry, f"{what}, number {at}") for at, entry in enumerate(value, 1))


_TILE_SIZES = ("mr", "nr", "mc", "nc", "kc", "threads_m", "threads_n")


def _checked_tile(entry: Any, what: str) -> dict[str, Any]:
    """Check one tile of a recipe: its shape, layout and block sizes."""
    if not isinstance(entry, Mapping) or entry.keys() != {"shape", "layout", "tile"}:
        raise Rejected("schema", f"{what}, has a shape, a layout and a tile")
    shape, tile = entry["shape"], entry["tile"]
    if not isinstance(shape, list | tuple) or len(shape) != 3 or not isinstance(tile, Mapping):
        raise Rejected("schema", f"{what}, has a shape of (m, n, k) and a tile of named sizes")
    required = {"mr", "nr", "mc", "nc", "kc"}
    if not required <= tile.keys() <= required | {"pack_a", "pack_b", "threads_m", "threads_n"}:
        raise Rejected("schema", f"{what}: a tile has mr, nr, mc, nc, kc and may have pack_a, pack_b and threads")
    sizes = {k: _whole_number(1, 1 << 20)(v, f"{what}, {k}") for k, v in tile.items() if k in _TILE_SIZES}
    packs = {k: _checked_bool(v, f"{what}, {k}") for k, v in tile.items() if k not in _TILE_SIZES}
    return {
        "shape": [_whole_number(1, 1 << 20)(n, f"{what}, shape") for n in shape],
        "layout": _one_of("nn", "nt", "tn", "tt")(entry["layout"], f"{what}, layout"),
        "tile": sizes | packs,
    }


_REQUIRED: Any = object()
_STEPS: dict[str, dict[str, tuple[Check, Any]]] = {
    "weights": {"file": (_file, _REQUIRED), "dtype": (_one_of("float32", "float16", "int8"), "float32")},
    "backend": {"name": (_one_of("native", "numpy"), _REQUIRED)},
    "tile": {"matmul": (_checked_tiles, _REQUIRED)},
    "shrink": {
        "sparsity": (_checked_fraction, _REQUIRED),
        "epochs": (_whole_number(0, 40), 0),
        "seed": (_whole_number(0, 2**31), 0),
    },
    "prune": {
        "sparsity": (_checked_fraction, _REQUIRED),
        "scope": (_one_of("global", "layer"), "global"),
        "epochs": (_whole_number(0, 40), 0),
        "sparse": (_checked_bool, True),
        "seed": (_whole_number(0, 2**31), 0),
    },
    "quantize": {
        "observer": (_one_of("minmax", "percentile", "mse", "entropy"), "minmax"),
        "samples": (_whole_number(1, 1437), 256),
        "keep_float": (_checked_names, ()),
    },
    "kv_cache": {"dtype": (_one_of("float32", "float16", "int8"), "float32")},
}
STEP_NAMES = tuple(_STEPS)
_ORDER = {"weights": 0, "shrink": 1, "prune": 1, "quantize": 2}
_FOR_IMAGES, _FOR_TEXT = {"shrink", "prune"}, {"kv_cache"}


def _parse_step(entry: Any, at: int) -> Step:
    """Parse step number `at` of a recipe, and fill in the defaults of its options."""
    where = f"step {at}"
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), str) or entry["step"] not in _STEPS:
        raise Rejected("schema", f'{where} needs "step": one of {", ".join(_STEPS)}')
    options_schema = _STEPS[entry["step"]]
    unknown = entry.keys() - options_schema.keys() - {"step"}
    if unknown:
        raise Rejected("schema", f"{where}, {entry['step']}, has no option {sorted(unknown)[0][:40]!r}")
    options = {}
    for key, (check, default) in options_schema.items():
        if key not in entry and default is _REQUIRED:
            raise Rejected("schema", f"{where}, {entry['step']}, needs {key!r}")
        options[key] = check(entry[key], f"{where}, {key}") if key in entry else default
    return Step(entry["step"], options)


def _check_order(recipe: Recipe) -> None:
    """Reject steps that repeat, come in the wrong order, or do not apply to the event."""
    names = [step.name for step in recipe.steps]
    if len(set(names)) != len(names):
        raise Rejected("schema", "a recipe may have each step only once")
    ranks = [_ORDER[name] for name in names if name in _ORDER]
    if ranks != sorted(ranks):
        raise Rejected("schema", "weights come first and quantize comes after shrink and prune")
    unfit = set(names) & (_FOR_TEXT if recipe.event.kind == "images" else _FOR_IMAGES)
    if unfit:
        raise Rejected("schema", f"{sorted(unfit)[0]} has no effect for {recipe.event.name}")
    own = "weights" in names
    if own and "shrink" in names:
        raise Rejected("schema", "shrink starts from the shipped weights: a recipe takes weights or shrink, not both")
    if own and any(step.options.get("epochs") for step in recipe.steps):
        raise Rejected("schema", "only the shipped weights are retrained here: with weights of your own, epochs is 0")
    if recipe.event.kind == "text" and "quantize" in names and "kv_cache" not in names:
        raise Rejected("schema", "a quantized gpt decodes over a cache: add the step kv_cache")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _option_text(value: Any) -> str:
    """Format an option's value for a one-line summary; a list as its length."""
    if isinstance(value, list | tuple):
        return f"of {len(value)}"
    return str(value).lower() if isinstance(value, bool) else str(value)
