"""From records to a collection: kernels in TpuGraphs' files, split by shape, with a schema that names every column.

Parameters become columns: numbers as they are, words by their place in an alphabetical list that the schema keeps. A
runtime is the median of a configuration's repeats. Where the log marks no default, the normalizer is the kernel's
median runtime, and the report says so. A configuration that failed takes for ever, which no whole number says: such
configurations are kept beside the others, under a key of their own. Where anything is known of a device, its card
(see `devices`) makes columns too. The folder appears when all is written. A few thousand kernels are a file each;
of more, each split is written as a few flat files (see `shards`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.devices import DEVICE_COLUMNS, DEVICES_FILE, Card, columns_of, find_card, known_name
from tilewise.costmodel.data.importers.description import Description, plain_graph
from tilewise.costmodel.data.importers.formats import FORMATS
from tilewise.costmodel.data.importers.record import Record
from tilewise.costmodel.data.importers.rows import MAX_WORDS, Configurations
from tilewise.costmodel.data.importers.spool import Spool, Spooled, Timed
from tilewise.costmodel.data.importers.stream import open_sources
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.data.shards import SplitWriter
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.tuning_data import kernel_npz
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

MAX_COLUMNS = 1024
MAX_FILES = 10_000
_HELD_BYTES = 64 << 20  # of the table of configurations; a larger one stays in its file
_SPLITS = ("train", "valid", "test")
_NONE = np.zeros(0, np.int64)


@dataclass
class Imported:
    """What became of a log, and what it did not say."""

    kernels: int = 0
    configurations: int = 0
    timings: int = 0
    failures: int = 0
    without_default: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)


def import_logs(
    format_name: str,
    files: Sequence[Path],
    out: Path,
    *,
    description: Description | None = None,
    device: str = "",
    cards: Mapping[str, Card] | None = None,
    split: str | None = None,
    device_columns: bool = False,
    progress: Callable[[int], None] = lambda records: None,
) -> Imported:
    """Read `files` of the tool `format_name` and write a collection under `out`.

    `device` names the machine where the log does not; without it, a well-known device's name in a file's name does.
    `cards` say what is known of devices by name, beside the table of well-known ones; with `device_columns` that enters
    the configurations too. `split` puts all kernels into one split instead of dividing them by shape; `progress` is
    told how many records were read so far.
    """
    if format_name not in FORMATS:
        raise ConfigurationError(f"{format_name!r} is no format; there are {', '.join(FORMATS)}.")
    if split is not None and split not in _SPLITS:
        raise ConfigurationError(f"{split!r} is no split; there are {', '.join(_SPLITS)}.")
    if out.exists():
        raise ConfigurationError(f"{out} is there already; give a new folder.")
    description = description or FORMATS[format_name].description
    report, details = Imported(), dict[str, Any]()
    with Spool() as spool, _appearing(out) as folder:
        for number, record in enumerate(_records(format_name, files, device, report), start=1):
            spool.add(record)
            if record.details or record.device not in details:
                details.setdefault(record.device, {}).update(record.details)
            if number % 10_000 == 0:
                progress(number)
        report.devices = sorted(name for name in details if name)
        known = {name: _card(name, details[name], cards or {}) for name in details}
        columns = _Columns.of(spool.configurations, description, report, device_columns and any(known.values()))
        splits = itertools.repeat(split) if split else _split_by_shape(spool.identities())
        with contextlib.ExitStack() as stack:
            writer = _Writer(
                spool=spool,
                table=_Table.of(spool, columns, description),
                description=description,
                devices={name: columns_of(card) for name, card in known.items()} if columns.devices else {},
                out=folder,
                packed=stack if len(spool) > MAX_FILES else None,
                report=report,
            )
            for kernel, place in zip(spool.kernels(), splits, strict=False):
                writer.write(kernel, place)
        if not report.kernels:
            reason = report.skipped.most_common(1)[0][0] if report.skipped else "no record in it"
            raise FileFormatError(f"No kernel could be read from {', '.join(f.name for f in files)}: {reason}.")
        _say_what_is_missing(report, columns, description)
        schema = json.dumps(_schema(format_name, columns, details, report), indent=1)
        (folder / "schema.json").write_text(schema, encoding="utf-8")
        told = {name: card for name, card in known.items() if name}
        (folder / DEVICES_FILE).write_text(json.dumps(told, indent=1), encoding="utf-8")
    return report


def _card(name: str, details: Mapping[str, Any], cards: Mapping[str, Card]) -> Card:
    """What the user says of a device, else the table, else the little that a log says."""
    said: Card = {}
    if isinstance(details.get("shared_memory"), int | float):
        said = {"vendor": "nvidia", "warp": 32, "shared_kib": details["shared_memory"] / 1024}
    return {**said, **find_card(name), **cards.get(name, {})}


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends without an error."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", suffix=".part", dir=out.parent))
    except OSError as error:
        raise UnavailableError(f"{out} cannot be written ({error.strerror or error}).") from error
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise UnavailableError(f"{out} cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _records(format_name: str, files: Sequence[Path], device: str, report: Imported) -> Iterable[Record]:
    """The records, each with its device if that is known anywhere."""

    def skip(reason: str) -> None:
        report.skipped[reason if len(report.skipped) < 50 else "other records"] += 1

    for path in files:
        for source in open_sources(path):
            name = device or known_name(source.name)
            for record in FORMATS[format_name].read(source, skip, path):
                yield record if record.device or not name else _on(record, name)


def _on(record: Record, device: str) -> Record:
    """The record with its device, whose name is taken out of the kernel's: that came from the file's name."""
    return record._replace(kernel=_without(record.kernel, device), device=device)


@functools.lru_cache(1000)
def _without(kernel: str, device: str) -> str:
    rest = re.sub(rf"[^A-Za-z0-9]*\b{re.escape(device)}\b", "", kernel.replace("_", " ")).strip()
    return rest.replace(" ", "_") or kernel


@dataclass(frozen=True)
class _Columns:
    """The columns of a configuration and, for those of words, each word's number: its place in order, from one on."""

    names: tuple[str, ...]
    words: Mapping[str, Mapping[str, float]]
    described: bool
    devices: bool

    @staticmethod
    def of(
        configs: Configurations,
        description: Description | None,
        report: Imported,
        devices: bool,
    ) -> _Columns:
        names, words = set(configs.names), dict(configs.words)
        for name in [name for name, found in words.items() if len(found) > MAX_WORDS]:
            report.missing.append(f"{name} has more than {MAX_WORDS} different words and was left out.")
            names.remove(name)
            del words[name]
        told = description.told if description else frozenset[str]()
        own = tuple(name for name in sorted(names) if name not in told and name not in DEVICE_COLUMNS)
        if len(own) > MAX_COLUMNS:
            raise FileFormatError(
                f"The configurations have {len(own)} different parameters; at most {MAX_COLUMNS} are read."
            )
        lists = {name: {word: 1.0 + place for place, word in enumerate(sorted(found))} for name, found in words.items()}
        return _Columns(own, lists, description is not None, devices)

    @property
    def own(self) -> tuple[str, ...]:
        """A collection needs one column at least, even where there is nothing to say."""
        return (*(TILE_FEATURES if self.described else ()), *self.names) or ("nothing",)

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.own, *(DEVICE_COLUMNS if self.devices else ()))


def _shape(identity: str) -> str:
    """A digest of the kernel and its sizes: on two devices they are one shape, which must not be in two splits."""
    _, _, rest = identity.partition(', "kernel": ')  # quotes inside a name are escaped
    kernel, _, sizes = rest.partition(', "sizes": ')
    return _digest(f"[{kernel}, {sizes[:-1]}]")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _split_by_shape(identities: Iterable[str]) -> Iterator[str]:
    """Each kernel's split: a tenth of the shapes for valid and test, one at least of three, in the order of digests."""
    digests = np.fromiter((int(_shape(identity), 16) for identity in identities), np.uint64)
    shapes, places = np.unique(digests, return_inverse=True)
    n = len(shapes)
    tenth = max(1, round(n / 10))
    valid, test = (tenth if n >= 2 else 0), (tenth if n >= 3 else 0)
    return ("valid" if place < valid else "test" if place < valid + test else "train" for place in places)


@dataclass(frozen=True)
class _Table:
    """The columns of every configuration, made once: kernels share configurations."""

    path: Path
    shape: tuple[int, int]
    held: Array | None

    @staticmethod
    def of(spool: Spool, columns: _Columns, description: Description | None) -> _Table:
        path, count, width = spool.folder / "table", len(spool.configurations), len(columns.own)
        bounds = (description.bounds(config) for config in spool.configurations.values()) if description else None
        with path.open("wb") as file:
            for own in spool.configurations.columns(columns.names, columns.words):
                own = own if bounds is None else np.hstack([list(itertools.islice(bounds, len(own))), own])
                (own if width == own.shape[1] else np.zeros((len(own), width))).astype(np.float32).tofile(file)
        small = count * width * 4 <= _HELD_BYTES
        return _Table(path, (count, width), np.fromfile(path, np.float32).reshape(count, width) if small else None)

    def rows(self, numbers: Array) -> Array:
        held = np.memmap(self.path, np.float32, "r", shape=self.shape) if self.held is None else self.held
        found: Array = np.asarray(held[numbers])
        return found


@dataclass(frozen=True)
class _Writer:
    """Turns what was spooled of a kernel into its file, and keeps the report."""

    spool: Spool
    table: _Table
    description: Description | None
    devices: Mapping[str, tuple[float, ...]]
    out: Path
    packed: contextlib.ExitStack | None  # ends what writes the flat files, where there are so many kernels
    report: Imported
    writers: dict[str, SplitWriter] = field(default_factory=dict)

    def write(self, spooled: Spooled, split: str) -> None:
        ran = spooled.configs["repeats"] > 0
        timed, failed = (spooled.configs, _NONE) if ran.all() else _parted(spooled.configs, ran)
        self.report.failures += len(failed)
        if not len(timed):
            self.report.skipped["a kernel none of whose configurations ran"] += 1
            return
        identity = spooled.identity
        feat = self._rows(timed["number"], identity["device"])
        runtime, normalizer = self._runtimes(timed)
        name = f"{_program(identity['kernel'], identity['device'])}_{_digest(spooled.text)}"
        # What `make_kernel` checks is known of these arrays.
        kernel = Kernel(name, "", *self._graph(identity, int(timed["number"][0])), feat, runtime, normalizer)
        beside = _beside(timed, spooled.text) | {"failed_config_feat": self._rows(failed, identity["device"])}
        if split not in self.report.splits:
            (self.out / split).mkdir(exist_ok=True)
            if self.packed:
                self.writers[split] = self.packed.enter_context(SplitWriter(self.out / split))
        if self.packed:
            self.writers[split].add(kernel, **beside)
        else:
            Path(f"{self.out}/{split}/{name}.npz").write_bytes(kernel_npz(kernel, **beside))
        self.report.kernels += 1
        self.report.configurations += len(timed)
        self.report.timings += int(timed["repeats"].sum())
        self.report.splits[split] = self.report.splits.get(split, 0) + 1

    def _rows(self, numbers: Array, device: str) -> Array:
        rows = self.table.rows(numbers)
        card = np.array(self.devices.get(device, ()), np.float32)
        return np.hstack([rows, np.broadcast_to(card, (len(rows), len(card)))]) if len(card) else rows

    def _graph(self, identity: Mapping[str, Any], any_config: int) -> KernelGraph:
        """Parameters may give sizes too: a filter's size may be a constant of the configuration."""
        values = {**self.spool.configurations.value(any_config), **identity["sizes"]}
        graph = self.description.graph(values) if self.description else None
        return graph or plain_graph(identity["sizes"])

    def _runtimes(self, timed: Timed) -> tuple[Array, Array]:
        runtime = np.maximum(1, np.rint(timed["median_ns"])).astype(np.int64)
        defaults = runtime[timed["is_default"]]
        self.report.without_default += not len(defaults)
        ordered = defaults[:1] if len(defaults) else np.sort(runtime)
        normalizer = int(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2  # the median
        return runtime, np.full(len(runtime), normalizer, np.int64)


def _parted(configs: Timed, ran: Array) -> tuple[Timed, Array]:
    return configs[ran], configs["number"][~ran]


@functools.lru_cache(1000)
def _program(kernel: str, device: str) -> str:
    """The kernel's name and the device's, in letters that a file's name may have."""
    text = "-".join(part for part in (kernel, device) if part)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-.")[:100] or "kernel"


def _beside(timed: Timed, problem: str) -> dict[str, Array]:
    """What a kernel file holds beyond its six arrays: scatter and number of the repeats, and who the kernel is."""
    return {
        "config_deviation": timed["deviation"].astype(np.float32),
        "config_repeats": np.minimum(timed["repeats"], 65535).astype(np.uint16),
        "problem": np.frombuffer(problem.encode(), np.uint8),
    }


def _say_what_is_missing(report: Imported, columns: _Columns, description: Description | None) -> None:
    if not report.devices:
        report.missing.append("The log does not say which device it was measured on; --device names it.")
    if description is None:
        report.missing.append(
            "Nothing says what the kernels compute; --describe FILE gives them a graph and tile bounds."
        )
    if not columns.names and description is None:
        report.missing.append("The configurations have no parameters.")
    if report.without_default:
        report.missing.append(
            f"No configuration is marked as the default in {report.without_default} of {report.kernels} kernels; "
            "their median runtime stands in for it."
        )


def _schema(format_name: str, columns: _Columns, details: Mapping[str, Any], report: Imported) -> dict[str, Any]:
    return {
        "config_features": list(columns.features),
        "name": f"imported from {format_name}",
        "kind": f"imported-{format_name}",
        "devices": dict(details),
        "words": {name: list(words) for name, words in columns.words.items()},
        "verdicts": {"ok": report.configurations, "failed": report.failures},
        "runtime": "median of the repeats, nanoseconds",
        "normalizer": "the configuration that the log marks as default, else the kernel's median runtime",
    }
