"""From records to a collection: kernels in TpuGraphs' files, split by shape, with a schema that names every column.

Parameters become columns: numbers as they are, words by their place in an alphabetical list that the schema keeps. A
runtime is the median of a configuration's repeats. Where the log marks no default, the normalizer is the kernel's
median runtime, and the report says so. A configuration that failed takes for ever, which no whole number says: such
configurations are kept beside the others, under a key of their own. Where anything is known of a device, its card
(see `devices`) makes columns too. The folder appears when all is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
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
from tilewise.costmodel.data.importers.record import Record, Value
from tilewise.costmodel.data.importers.spool import Spool, Spooled, Timed
from tilewise.costmodel.data.importers.stream import open_sources
from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.tuning_data import kernel_npz
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

MAX_COLUMNS = 1024
MAX_WORDS = 4096
MAX_CONFIGS = 2_000_000
_SPLITS = ("train", "valid", "test")


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
            details.setdefault(record.device, {}).update(record.details)
            if number % 10_000 == 0:
                progress(number)
        report.devices = sorted(name for name in details if name)
        known = {name: _card(name, details[name], cards or {}) for name in details}
        columns = _Columns.of(spool.configurations(), description, report, device_columns and any(known.values()))
        by_shape = _split_by_shape(spool.identities())
        writer = _Writer(
            spool=spool,
            columns=columns,
            description=description,
            devices={name: columns_of(card) for name, card in known.items()} if columns.devices else {},
            out=folder,
            split_of=lambda identity: split or by_shape[_digest(_shape(identity))],
            report=report,
        )
        for kernel in spool.kernels():
            writer.write(kernel)
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
    kernel = re.sub(rf"[^A-Za-z0-9]*\b{re.escape(device)}\b", "", record.kernel.replace("_", " ")).strip()
    kernel = kernel.replace(" ", "_") or record.kernel
    return dataclasses.replace(record, kernel=kernel, device=device)


@dataclass(frozen=True)
class _Columns:
    """The columns of a configuration and, for those of words, the words in order."""

    names: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    described: bool
    devices: bool

    @staticmethod
    def of(
        configs: Iterable[tuple[int, Mapping[str, Value]]],
        description: Description | None,
        report: Imported,
        devices: bool,
    ) -> _Columns:
        words: dict[str, set[str]] = {}
        names: dict[str, None] = {}
        for number, config in configs:
            if number > MAX_CONFIGS:
                raise FileFormatError(f"The log holds more than {MAX_CONFIGS:,} different configurations.")
            names.update(dict.fromkeys(config))
            for name, value in config.items():
                if isinstance(value, str) and len(words.setdefault(name, set())) <= MAX_WORDS:
                    words[name].add(value)
        for name in [name for name, found in words.items() if len(found) > MAX_WORDS]:
            report.missing.append(f"{name} has more than {MAX_WORDS} different words and was left out.")
            del names[name], words[name]
        told = description.told if description else frozenset[str]()
        own = tuple(name for name in sorted(names) if name not in told and name not in DEVICE_COLUMNS)
        if len(own) > MAX_COLUMNS:
            raise FileFormatError(
                f"The configurations have {len(own)} different parameters; at most {MAX_COLUMNS} are read."
            )
        lists = {name: tuple(sorted(found)) for name, found in words.items()}
        return _Columns(own, lists, description is not None, devices)

    def row(self, config: Mapping[str, Value], description: Description | None) -> list[float]:
        bounds: list[float] = list(description.bounds(config)) if description else []
        return bounds + [self._number(name, config.get(name, 0.0)) for name in self.names] or [0.0]

    def _number(self, name: str, value: Value) -> float:
        """A number as it is; a word by its place in the list, from one on; 0 where nothing is said."""
        if isinstance(value, str):
            return 1.0 + self.words[name].index(value)
        return value

    @property
    def features(self) -> tuple[str, ...]:
        """A collection needs one column at least, even where there is nothing to say."""
        own = (*(TILE_FEATURES if self.described else ()), *self.names) or ("nothing",)
        return (*own, *(DEVICE_COLUMNS if self.devices else ()))


def _shape(identity: Mapping[str, Any]) -> str:
    """The kernel and its sizes: on two devices they are one shape, which must not be in two splits."""
    return json.dumps([identity["kernel"], identity["sizes"]], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _split_by_shape(identities: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A tenth of the shapes each for valid and test, one at least where there are three, in the order of digests."""
    digests = sorted({_digest(_shape(identity)) for identity in identities})
    n = len(digests)
    tenth = max(1, round(n / 10))
    valid, test = (tenth if n >= 2 else 0), (tenth if n >= 3 else 0)
    names = ["valid"] * valid + ["test"] * test + ["train"] * (n - valid - test)
    return dict(zip(digests, names, strict=True))


@dataclass(frozen=True)
class _Writer:
    """Turns what was spooled of a kernel into its file, and keeps the report."""

    spool: Spool
    columns: _Columns
    description: Description | None
    devices: Mapping[str, tuple[float, ...]]
    out: Path
    split_of: Callable[[Mapping[str, Any]], str]
    report: Imported

    def write(self, spooled: Spooled) -> None:
        timed = [config for config in spooled.configs if config.repeats]
        failed = [config.number for config in spooled.configs if not config.repeats]
        self.report.failures += len(failed)
        if not timed:
            self.report.skipped["a kernel none of whose configurations ran"] += 1
            return
        identity, split = spooled.identity, self.split_of(spooled.identity)
        feat = self._rows([config.number for config in timed], identity["device"])
        runtime, normalizer = self._runtimes(timed)
        name = f"{_program(identity)}_{_digest(json.dumps(identity, sort_keys=True))}"
        kernel = make_kernel(name, *self._graph(identity, timed[0].number), feat, runtime, normalizer)
        beside = _beside(timed, identity) | {"failed_config_feat": self._rows(failed, identity["device"])}
        (self.out / split).mkdir(exist_ok=True)
        (self.out / split / f"{name}.npz").write_bytes(kernel_npz(kernel, **beside))
        self.report.kernels += 1
        self.report.configurations += len(timed)
        self.report.timings += sum(config.repeats for config in timed)
        self.report.splits[split] = self.report.splits.get(split, 0) + 1

    def _rows(self, numbers: Sequence[int], device: str) -> Array:
        card, rows = [*self.devices.get(device, ())], np.empty((len(numbers), len(self.columns.features)), np.float32)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.columns.row(self.spool.configuration(number), self.description) + card
        return rows

    def _graph(self, identity: Mapping[str, Any], any_config: int) -> KernelGraph:
        """Parameters may give sizes too: a filter's size may be a constant of the configuration."""
        values = {**self.spool.configuration(any_config), **identity["sizes"]}
        graph = self.description.graph(values) if self.description else None
        return graph or plain_graph(identity["sizes"])

    def _runtimes(self, timed: Sequence[Timed]) -> tuple[Array, Array]:
        runtime = np.maximum(1, np.rint([config.median_ns for config in timed])).astype(np.int64)
        defaults = [int(ns) for ns, config in zip(runtime, timed, strict=True) if config.is_default]
        self.report.without_default += not defaults
        normalizer = defaults[0] if defaults else max(1, int(np.median(runtime)))
        return runtime, np.full(len(runtime), normalizer, np.int64)


def _program(identity: Mapping[str, Any]) -> str:
    """The kernel's name and the device's, in letters that a file's name may have."""
    text = "-".join(part for part in (identity["kernel"], identity["device"]) if part)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-.")[:100] or "kernel"


def _beside(timed: Sequence[Timed], identity: Mapping[str, Any]) -> dict[str, Array]:
    """What a kernel file holds beyond its six arrays: scatter and number of the repeats, and who the kernel is."""
    return {
        "config_deviation": np.array([config.deviation for config in timed], np.float32),
        "config_repeats": np.array([min(config.repeats, 65535) for config in timed], np.uint16),
        "problem": np.frombuffer(json.dumps(identity, sort_keys=True).encode(), np.uint8),
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
