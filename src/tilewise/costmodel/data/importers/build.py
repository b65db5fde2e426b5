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
import json
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.importers import helion, inductor, kernel_tuner, tvm, vllm
from tilewise.costmodel.data.importers.description import MATRIX_PRODUCT, KernelDescription, plain_graph
from tilewise.costmodel.data.importers.record import LogRecord, Skip
from tilewise.costmodel.data.importers.record_table import MAX_WORDS, ConfigTimings, LoggedConfigs, RecordTable
from tilewise.costmodel.data.importers.stream import Source, open_sources
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.npz import Array
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.data.writing import SplitWriter, kernel_npz
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

MAX_COLUMNS = 1024
MAX_FILES = 10_000
_MAX_FEATURES = 1 << 30  # of all configurations together, 4 GiB
_MAX_SKIP_REASONS = 50
_SPLITS = ("train", "valid", "test")
# GPUs whose name in a file's name counts as the name of the device.
_GPU_NAMES = ("A100", "A4000", "A6000", "H100", "H200", "MI250X", "W6600", "W7800")


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
    report, details, table = ImportReport(), dict[str, Any](), RecordTable()
    with _new_folder(out) as folder:
        for number, record in enumerate(_read_records(format_name, files, device, report), start=1):
            table.add(record)
            if record.details or record.device not in details:
                details.setdefault(record.device, {}).update(record.details)
            if number % 10_000 == 0:
                progress(number)
        report.devices = sorted(name for name in details if name)
        # Now that all parameters and words are known, compute features and write kernels.
        columns = _Columns.of(table.configurations, description, report)
        _write_kernels(table, columns, description, split, folder, report)
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
    """Yield a temporary folder, which becomes `out` if the block ends without an exception."""
    # The name is known before the folder exists, so that a signal at any moment leaves nothing.
    folder = out.parent / f".{out.name[:100]}.{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(out)
    except OSError as error:
        raise UnavailableError(f"{out} cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_records(format_name: str, files: Sequence[Path], device: str, report: ImportReport) -> Iterable[LogRecord]:
    """Yield the records of all files and complete the device of those that do not name it."""

    def skip(reason: str) -> None:
        """Count a record that is skipped for this reason."""
        report.skipped[reason if len(report.skipped) < _MAX_SKIP_REASONS else "other records"] += 1

    for path in files:
        for source in open_sources(path):
            source_device = device or gpu_name_in(source.name)
            for record in FORMATS[format_name].read_records(source, skip):
                yield record if record.device or not source_device else _with_device(record, source_device)


def gpu_name_in(text: str) -> str:
    """Return the well-known GPU that `text` names as a separate word, or an empty text.

    >>> gpu_name_in("convolution_a100.T4.json.gz")
    'A100'
    """
    words = {word.upper() for word in re.split(r"[^A-Za-z0-9]+", text)}
    return next((name for name in _GPU_NAMES if name in words), "")


def _with_device(record: LogRecord, device: str) -> LogRecord:
    """Set a record's device, and remove the device's name from a kernel that is named after its file."""
    return record._replace(kernel=_remove_device_name(record.kernel, device), device=device)


@functools.lru_cache(1000)
def _remove_device_name(kernel: str, device: str) -> str:
    name = re.sub(rf"[^A-Za-z0-9]*\b{re.escape(device)}\b", "", kernel.replace("_", " ")).strip()
    return name.replace(" ", "_") or kernel


@dataclass(frozen=True)
class _Columns:
    """Parameters of the configurations that become columns, and the number that encodes each word, from 1."""

    names: tuple[str, ...]
    words: Mapping[str, Mapping[str, float]]
    has_tile_bounds: bool

    @staticmethod
    def of(configs: LoggedConfigs, description: KernelDescription | None, report: ImportReport) -> _Columns:
        """Choose the columns: all parameters except those with too many words or equal to a tile bound."""
        # A parameter with thousands of words is an identifier rather than a setting.
        names, words = configs.names, dict(configs.words)
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
    """Hash a kernel's name and sizes without the device, so that one shape is never in two splits."""
    _, _, kernel_and_sizes = identity.partition(', "kernel": ')  # quotes inside a name are escaped
    kernel, _, sizes = kernel_and_sizes.partition(', "sizes": ')
    return _short_digest(f"[{kernel}, {sizes[:-1]}]")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _split_by_shape(identities: Iterable[str]) -> list[str]:
    """Assign a split to each kernel: shapes are ordered by digest, a tenth of them for valid and a tenth for test.

    Two shapes are enough for a valid split and three for a test split.
    """
    # Splitting by digest is deterministic and independent of the order of the log.
    digests = np.fromiter((int(_shape_digest(identity), 16) for identity in identities), np.uint64)
    shapes, ranks = np.unique(digests, return_inverse=True)
    n = len(shapes)
    tenth = max(1, round(n / 10))
    valid, test = (tenth if n >= 2 else 0), (tenth if n >= 3 else 0)
    return ["valid" if rank < valid else "test" if rank < valid + test else "train" for rank in ranks]


def _config_features(configs: LoggedConfigs, columns: _Columns, description: KernelDescription | None) -> Array:
    """Compute the features of all configurations (configurations, columns) once: kernels share configurations."""
    if len(configs) * len(columns.features) > _MAX_FEATURES:
        raise FileFormatError(f"The log has {len(configs):,} configurations of {len(columns.features)} columns each.")
    table = configs.columns(columns.names, columns.words)
    if description is not None:
        bounds = [description.bounds(configs.numeric_parameters(number)) for number in range(len(configs))]
        table = np.hstack([np.array(bounds, np.float32).reshape(-1, len(TILE_FEATURES)), table])
    # Without any parameters there is a single column of zeros.
    return table if table.shape[1] else np.zeros((len(configs), 1), np.float32)


def _write_kernels(
    table: RecordTable,
    columns: _Columns,
    description: KernelDescription | None,
    split: str | None,
    out: Path,
    report: ImportReport,
) -> None:
    """Write every kernel to its split's folder: one file each, or flat files if there are many."""
    features = _config_features(table.configurations, columns, description)
    splits = [split] * len(table.identities) if split else _split_by_shape(table.identities)
    writers: dict[str, SplitWriter] = {}
    with contextlib.ExitStack() as flat_files:
        for (identity, timings), kernel_split in zip(table.kernels(), splits, strict=True):
            succeeded = timings["repeats"] > 0
            failures, timings = timings["number"][~succeeded], timings[succeeded]
            report.failures += len(failures)
            if not len(timings):
                report.skipped["a kernel with no configuration that ran"] += 1
                continue
            sizes_from = table.configurations.numeric_parameters(int(timings["number"][0]))
            kernel = _build_kernel(identity, timings, features, _build_graph(identity, sizes_from, description))
            extra_arrays = _extra_arrays(timings, identity)
            extra_arrays["failed_config_feat"] = features[failures]
            # The folder of a split is created with its first kernel, so that no split is empty.
            folder = out / kernel_split
            folder.mkdir(exist_ok=True)
            if len(table.identities) <= MAX_FILES:
                (folder / f"{kernel.name}.npz").write_bytes(kernel_npz(kernel, **extra_arrays))
            else:
                if kernel_split not in writers:
                    writers[kernel_split] = flat_files.enter_context(SplitWriter(folder))
                writers[kernel_split].add(kernel, **extra_arrays)
            report.kernels += 1
            report.configurations += len(timings)
            report.timings += int(timings["repeats"].sum())
            report.without_default += not timings["is_default"].any()
            report.splits[kernel_split] = report.splits.get(kernel_split, 0) + 1


def _build_kernel(identity: str, timings: ConfigTimings, features: Array, graph: KernelGraph) -> Kernel:
    """Build a `Kernel` from its timings; `features` has a row for every configuration of the import."""
    runtime = np.maximum(1, np.rint(timings["median_ns"])).astype(np.int64)
    # The normalizer is the default's runtime if the log marks one, else the median.
    defaults = runtime[timings["is_default"]]
    candidates = defaults[:1] if len(defaults) else np.sort(runtime)
    normalizer = int(candidates[(len(candidates) - 1) // 2] + candidates[len(candidates) // 2]) // 2
    fields = json.loads(identity)
    program = _program_name(fields["kernel"], fields["device"])
    return Kernel(
        f"{program}_{_short_digest(identity)}",
        program,
        *graph,
        config_feat=features[timings["number"]],
        runtime=runtime,
        normalizer=np.full(len(runtime), normalizer, np.int64),
    )


def _build_graph(identity: str, parameters: Mapping[str, Any], description: KernelDescription | None) -> KernelGraph:
    """Build a kernel's graph from its sizes, which may also be among the `parameters` of its configurations."""
    sizes = json.loads(identity)["sizes"]
    graph = description.graph({**parameters, **sizes}) if description else None
    return graph or plain_graph(sizes)


@functools.lru_cache(1000)
def _program_name(kernel: str, device: str) -> str:
    """Return a program name made of kernel and device, with only characters that are valid in file names."""
    # The program is the part of a kernel's name before the last underscore, so it must not contain one.
    text = "-".join(name for name in (kernel, device) if name)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-.")[:100] or "kernel"


def _extra_arrays(timings: ConfigTimings, identity: str) -> dict[str, Array]:
    """Return the additional arrays of a kernel file: deviations, repeats and the kernel's identity."""
    return {
        "config_deviation": timings["deviation"].astype(np.float32),
        "config_repeats": np.minimum(timings["repeats"], 65535).astype(np.uint16),
        "problem": np.frombuffer(identity.encode(), np.uint8),
    }


def _report_missing(report: ImportReport, columns: _Columns, description: KernelDescription | None) -> None:
    """Add a sentence to the report for each piece of information that neither log nor options have."""
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
    """Return the content of ``schema.json``: column names, the tool `format_name`, and details of the import."""
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

    read_records: Callable[[Source, Skip], Iterator[LogRecord]]
    tool: str
    description: KernelDescription | None = None
    runtime_note: str = "median of the repeats, nanoseconds"  # meaning of `runtime`, for the schema


# Inductor's records are all matrix products, so that format implies a description.
FORMATS: dict[str, Format] = {
    "kernel-tuner": Format(kernel_tuner.read_records, "Kernel Tuner: T4 files and caches"),
    "autotvm": Format(tvm.read_autotvm, "TVM's AutoTVM: logs"),
    "metaschedule": Format(tvm.read_metaschedule, "TVM's MetaSchedule: database_tuning_record.json"),
    "inductor": Format(inductor.read_records, "PyTorch: AutoHeuristic's text, feedback records", MATRIX_PRODUCT),
    "triton": Format(inductor.read_triton_cache, "Triton: *.autotune.json of its cache"),
    "helion": Format(helion.read_records, "Helion: HELION_AUTOTUNE_LOG's csv and meta.jsonl"),
    "vllm": Format(
        vllm.read_records,
        "vLLM and SGLang: tuned configurations (JSON, or an archive)",
        runtime_note=vllm.RUNTIME_NOTE,
    ),
}
