"""Builds a collection from log records: kernels in TpuGraphs' file format, split by shape, with a schema.

Parameters become columns: numbers unchanged, words as their position in an alphabetical list that the schema stores. A
runtime is the median of a configuration's repeats. If the log marks no default, the normalizer is the kernel's median
runtime, and the report says so. Failed configurations have no runtime and are stored under a separate key. The folder
appears when everything is written. Up to `MAX_FILES` kernels get a file each; with more, each split is written as a few
flat files (see `shards`).
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

from tilewise.costmodel.data.importers import helion, inductor, kernel_tuner, tvm, vllm
from tilewise.costmodel.data.importers.config_index import MAX_WORDS, ConfigIndex
from tilewise.costmodel.data.importers.description import MATRIX_PRODUCT, KernelDescription, plain_graph
from tilewise.costmodel.data.importers.record import LogRecord
from tilewise.costmodel.data.importers.spool import ConfigTimings, Spool, SpooledKernel
from tilewise.costmodel.data.importers.stream import Source, open_sources
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.data.writing import SplitWriter, kernel_npz
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

MAX_COLUMNS = 1024
MAX_FILES = 10_000
_MAX_FEATURES_IN_MEMORY = 64 << 20  # bytes of the features of all configurations; larger ones stay in their file
_MAX_SKIP_REASONS = 50
_SPLITS = ("train", "valid", "test")
_EMPTY = np.zeros(0, np.int64)
# GPUs whose name in a file's name counts as the name of the device.
_GPU_NAMES = ("A100", "A4000", "A6000", "H100", "H200", "MI250X", "W6600", "W7800")

Skip = Callable[[str], None]


@dataclass
class ImportReport:
    """Counts of imported and skipped records, and sentences about missing information.

    The field names are the JSON keys of `tilewise tiles import --json`.
    """

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
    description: KernelDescription | None = None,
    device: str = "",
    split: str | None = None,
    progress: Callable[[int], None] = lambda records: None,
) -> ImportReport:
    """Read log `files` of the tool `format_name` and write a collection to the new folder `out`.

    `device` names the device for records that do not; without it, the name of a well-known GPU in the file's name is
    used. `split` puts all kernels into one split instead of splitting by shape. `progress` is called with the number of
    records read so far.
    """
    if format_name not in FORMATS:
        raise ConfigurationError(f"{format_name!r} is not a known format; use one of {', '.join(FORMATS)}.")
    if split is not None and split not in _SPLITS:
        raise ConfigurationError(f"{split!r} is not a split; use one of {', '.join(_SPLITS)}.")
    if out.exists():
        raise ConfigurationError(f"{out} exists already; give a new folder.")
    description = description or FORMATS[format_name].description
    report, details = ImportReport(), dict[str, Any]()
    # First pass: read every record, group timings by kernel, number the configurations.
    with Spool() as spool, _new_folder(out) as folder:
        for number, record in enumerate(_read_records(format_name, files, device, report), start=1):
            spool.add(record)
            if record.details or record.device not in details:
                details.setdefault(record.device, {}).update(record.details)
            if number % 10_000 == 0:
                progress(number)
        report.devices = sorted(name for name in details if name)
        # Second pass: now that all parameters and words are known, compute features and write kernels.
        columns = _Columns.of(spool.configurations, description, report)
        splits = itertools.repeat(split) if split else _split_by_shape(spool.identities())
        with contextlib.ExitStack() as stack:
            writer = _KernelWriter(
                spool=spool,
                features=_ConfigFeatures.compute(spool, columns, description),
                description=description,
                out=folder,
                flat_files=stack if len(spool) > MAX_FILES else None,
                report=report,
            )
            for kernel, kernel_split in zip(spool.kernels(), splits, strict=False):
                writer.write(kernel, kernel_split)
        # An import without kernels is an error, with the most frequent reason for skipping records.
        if not report.kernels:
            reason = report.skipped.most_common(1)[0][0] if report.skipped else "it contains no record"
            raise FileFormatError(f"No kernel could be read from {', '.join(f.name for f in files)}: {reason}.")
        _report_missing(report, columns, description)
        schema = json.dumps(_schema(format_name, columns, details, report), indent=1)
        (folder / "schema.json").write_text(schema, encoding="utf-8")
    return report


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` when the block ends without an error."""
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


def _read_records(format_name: str, files: Sequence[Path], device: str, report: ImportReport) -> Iterable[LogRecord]:
    """Yield the records of all files and complete the device of those that do not name it."""

    def skip(reason: str) -> None:
        report.skipped[reason if len(report.skipped) < _MAX_SKIP_REASONS else "other records"] += 1

    for path in files:
        for source in open_sources(path):
            source_device = device or gpu_name_in(source.name)
            for record in FORMATS[format_name].read_records(source, skip, path):
                yield record if record.device or not source_device else _with_device(record, source_device)


def gpu_name_in(text: str) -> str:
    """Return the well-known GPU that `text` names as a separate word, or an empty text.

    >>> gpu_name_in("convolution_a100.T4.json.gz")
    'A100'
    """
    words = {word.upper() for word in re.split(r"[^A-Za-z0-9]+", text)}
    return next((name for name in _GPU_NAMES if name in words), "")


def _with_device(record: LogRecord, device: str) -> LogRecord:
    """Set the device of a record; a kernel that is named after the file loses the device's name."""
    return record._replace(kernel=_remove_device_name(record.kernel, device), device=device)


@functools.lru_cache(1000)
def _remove_device_name(kernel: str, device: str) -> str:
    name = re.sub(rf"[^A-Za-z0-9]*\b{re.escape(device)}\b", "", kernel.replace("_", " ")).strip()
    return name.replace(" ", "_") or kernel


@dataclass(frozen=True)
class _Columns:
    """The parameters that become columns, and for each parameter with words the number of every word, from 1."""

    names: tuple[str, ...]
    words: Mapping[str, Mapping[str, float]]
    has_tile_bounds: bool

    @staticmethod
    def of(configs: ConfigIndex, description: KernelDescription | None, report: ImportReport) -> _Columns:
        """Choose the columns: all parameters except those with too many words or equal to a tile bound."""
        # A parameter with thousands of words is an identifier rather than a setting.
        names, words = set(configs.names), dict(configs.words)
        for name in [name for name, word_list in words.items() if len(word_list) > MAX_WORDS]:
            report.missing.append(f"{name} has more than {MAX_WORDS} different words and was left out.")
            names.remove(name)
            del words[name]
        tile_parameters = description.tile_parameters if description else frozenset[str]()
        columns = tuple(name for name in sorted(names) if name not in tile_parameters)
        if len(columns) > MAX_COLUMNS:
            raise FileFormatError(
                f"The configurations have {len(columns)} different parameters; at most {MAX_COLUMNS} are read."
            )
        # Numbers follow the alphabet, so that they do not depend on the order of the log.
        word_numbers = {
            name: {word: 1.0 + position for position, word in enumerate(sorted(word_list))}
            for name, word_list in words.items()
        }
        return _Columns(columns, word_numbers, description is not None)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all columns; a collection needs at least one, even if there are no parameters."""
        return (*(TILE_FEATURES if self.has_tile_bounds else ()), *self.names) or ("nothing",)


def _shape_digest(identity: str) -> str:
    """Return a digest of the kernel and its sizes without the device: one shape must not be in two splits."""
    _, _, kernel_and_sizes = identity.partition(', "kernel": ')  # quotes inside a name are escaped
    kernel, _, sizes = kernel_and_sizes.partition(', "sizes": ')
    return _short_digest(f"[{kernel}, {sizes[:-1]}]")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _split_by_shape(identities: Iterable[str]) -> Iterator[str]:
    """Yield each kernel's split: a tenth of the shapes, in the order of their digests, for valid and for test.

    Two shapes are enough for a valid split and three for a test split.
    """
    # Splitting by digest is deterministic and independent of the order of the log.
    digests = np.fromiter((int(_shape_digest(identity), 16) for identity in identities), np.uint64)
    shapes, ranks = np.unique(digests, return_inverse=True)
    n = len(shapes)
    tenth = max(1, round(n / 10))
    valid, test = (tenth if n >= 2 else 0), (tenth if n >= 3 else 0)
    return ("valid" if rank < valid else "test" if rank < valid + test else "train" for rank in ranks)


@dataclass(frozen=True)
class _ConfigFeatures:
    """The feature rows of all configurations, computed once because kernels share configurations."""

    path: Path
    shape: tuple[int, int]
    in_memory: Array | None  # (configurations, columns), or None if too large

    @staticmethod
    def compute(spool: Spool, columns: _Columns, description: KernelDescription | None) -> _ConfigFeatures:
        """Write the features of every configuration to a file, and load them if they are small."""
        path, count, width = spool.folder / "table", len(spool.configurations), len(columns.features)
        # Tile bounds are computed configuration by configuration, in step with the chunks below.
        bounds = (description.bounds(config) for config in spool.configurations.configs()) if description else None
        with path.open("wb") as file:
            for chunk in spool.configurations.columns(columns.names, columns.words):
                if bounds is not None:
                    chunk = np.hstack([list(itertools.islice(bounds, len(chunk))), chunk])
                if chunk.shape[1] != width:  # no parameters at all: the single column of zeros
                    chunk = np.zeros((len(chunk), width))
                chunk.astype(np.float32).tofile(file)
        if count * width * 4 > _MAX_FEATURES_IN_MEMORY:
            return _ConfigFeatures(path, (count, width), None)
        return _ConfigFeatures(path, (count, width), np.fromfile(path, np.float32).reshape(count, width))

    def rows(self, numbers: Array) -> Array:
        """Return the features of the configurations with these numbers: (len(numbers), columns)."""
        table = self.in_memory
        if table is None:
            table = np.memmap(self.path, np.float32, "r", shape=self.shape)
        return np.asarray(table[numbers])


@dataclass(frozen=True)
class _KernelWriter:
    """Writes spooled kernels to the collection and updates the report."""

    spool: Spool
    features: _ConfigFeatures
    description: KernelDescription | None
    out: Path
    flat_files: contextlib.ExitStack | None  # closes the writers of flat files; None: one file per kernel
    report: ImportReport
    writers: dict[str, SplitWriter] = field(default_factory=dict)

    def write(self, spooled: SpooledKernel, split: str) -> None:
        """Write one kernel to a split; skip it if all its configurations failed."""
        succeeded = spooled.configs["repeats"] > 0
        timings, failed_numbers = spooled.configs, _EMPTY
        if not succeeded.all():
            timings, failed_numbers = spooled.configs[succeeded], spooled.configs["number"][~succeeded]
        self.report.failures += len(failed_numbers)
        if not len(timings):
            self.report.skipped["a kernel with no configuration that ran"] += 1
            return
        identity = spooled.identity
        config_feat = self.features.rows(timings["number"])
        runtime, normalizer = self._runtimes(timings)
        name = f"{_program(identity['kernel'], identity['device'])}_{_short_digest(spooled.text)}"
        graph = self._graph(identity, int(timings["number"][0]))
        # These arrays satisfy the checks of `make_kernel` by construction.
        kernel = Kernel(name, "", *graph, config_feat=config_feat, runtime=runtime, normalizer=normalizer)
        extra_arrays = _extra_arrays(timings, spooled.text)
        extra_arrays["failed_config_feat"] = self.features.rows(failed_numbers)
        # The folder of a split is created with its first kernel, so that no split is empty.
        if split not in self.report.splits:
            (self.out / split).mkdir(exist_ok=True)
            if self.flat_files:
                self.writers[split] = self.flat_files.enter_context(SplitWriter(self.out / split))
        if self.flat_files:
            self.writers[split].add(kernel, **extra_arrays)
        else:
            Path(f"{self.out}/{split}/{name}.npz").write_bytes(kernel_npz(kernel, **extra_arrays))
        self.report.kernels += 1
        self.report.configurations += len(timings)
        self.report.timings += int(timings["repeats"].sum())
        self.report.splits[split] = self.report.splits.get(split, 0) + 1

    def _graph(self, identity: Mapping[str, Any], config_number: int) -> KernelGraph:
        """Build the graph. Sizes may come from any configuration, such as a filter size that is a parameter."""
        values = {**self.spool.configurations.config(config_number), **identity["sizes"]}
        graph = self.description.graph(values) if self.description else None
        return graph or plain_graph(identity["sizes"])

    def _runtimes(self, timings: ConfigTimings) -> tuple[Array, Array]:
        """Return runtimes and normalizers: the default's runtime if the log marks one, else the median."""
        runtime = np.maximum(1, np.rint(timings["median_ns"])).astype(np.int64)
        defaults = runtime[timings["is_default"]]
        self.report.without_default += not len(defaults)
        candidates = defaults[:1] if len(defaults) else np.sort(runtime)
        normalizer = int(candidates[(len(candidates) - 1) // 2] + candidates[len(candidates) // 2]) // 2  # the median
        return runtime, np.full(len(runtime), normalizer, np.int64)


@functools.lru_cache(1000)
def _program(kernel: str, device: str) -> str:
    """Join the names of the kernel and the device with the characters that a file name may have."""
    # The program is the part of a kernel's name before the last underscore, so it must not contain one.
    text = "-".join(name for name in (kernel, device) if name)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-.")[:100] or "kernel"


def _extra_arrays(timings: ConfigTimings, identity: str) -> dict[str, Array]:
    """Return what a kernel file stores beyond its six arrays: deviation and number of repeats, and the identity."""
    return {
        "config_deviation": timings["deviation"].astype(np.float32),
        "config_repeats": np.minimum(timings["repeats"], 65535).astype(np.uint16),
        "problem": np.frombuffer(identity.encode(), np.uint8),
    }


def _report_missing(report: ImportReport, columns: _Columns, description: KernelDescription | None) -> None:
    """Add a sentence to the report for each thing that the log and the options do not say."""
    if not report.devices:
        report.missing.append("The log does not say which device it was measured on; --device names it.")
    if description is None:
        report.missing.append(
            "The log does not say what the kernels compute; --describe FILE adds a graph and tile bounds."
        )
    if not columns.names and description is None:
        report.missing.append("The configurations have no parameters.")
    if report.without_default:
        report.missing.append(
            f"No configuration is marked as the default in {report.without_default} of {report.kernels} kernels; "
            "their median runtime is used instead."
        )


def _schema(format_name: str, columns: _Columns, details: Mapping[str, Any], report: ImportReport) -> dict[str, Any]:
    """Return the content of ``schema.json``."""
    return {
        "config_features": list(columns.features),
        "name": f"imported from {format_name}",
        "kind": f"imported-{format_name}",
        "devices": dict(details),
        "words": {name: list(words) for name, words in columns.words.items()},
        "verdicts": {"ok": report.configurations, "failed": report.failures},
        "runtime": FORMATS[format_name].runtime_note,
        "normalizer": "the configuration that the log marks as default, else the kernel's median runtime",
    }


@dataclass(frozen=True)
class Format:
    """Reader for the files of one tool; `tool` says what writes them."""

    read_records: Callable[[Source, Skip, Path], Iterator[LogRecord]]
    tool: str
    description: KernelDescription | None = None
    runtime_note: str = "median of the repeats, nanoseconds"  # what the numbers in `runtime` are, for the schema


def _ignore_path(
    reader: Callable[[Source, Skip], Iterator[LogRecord]],
) -> Callable[[Source, Skip, Path], Iterator[LogRecord]]:
    """Adapt a reader that needs the text of one file only."""
    return lambda source, skip, path: reader(source, skip)


# Inductor's records are all matrix products, so that format implies a description.
FORMATS: dict[str, Format] = {
    "kernel-tuner": Format(_ignore_path(kernel_tuner.read_records), "Kernel Tuner: T4 files and caches"),
    "autotvm": Format(_ignore_path(tvm.read_autotvm), "TVM's AutoTVM: logs"),
    "metaschedule": Format(_ignore_path(tvm.read_metaschedule), "TVM's MetaSchedule: database_tuning_record.json"),
    "inductor": Format(
        _ignore_path(inductor.read_records), "PyTorch: AutoHeuristic's text, feedback records", MATRIX_PRODUCT
    ),
    "triton": Format(_ignore_path(inductor.read_triton_cache), "Triton: *.autotune.json of its cache"),
    "helion": Format(helion.read_records, "Helion: HELION_AUTOTUNE_LOG's csv and meta.jsonl"),
    "vllm": Format(
        _ignore_path(vllm.read_records),
        "vLLM and SGLang: tuned configurations (JSON, or an archive)",
        runtime_note=vllm.RUNTIME_NOTE,
    ),
}
