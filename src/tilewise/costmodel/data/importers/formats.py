"""Table of the supported log formats: a reader of records, and a kernel description if the format implies one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewise.costmodel.data.importers import helion, inductor, kernel_tuner, triton_cache, tvm, vllm
from tilewise.costmodel.data.importers.description import MATRIX_PRODUCT, KernelDescription
from tilewise.costmodel.data.importers.record import LogRecord
from tilewise.costmodel.data.importers.stream import Source

Skip = Callable[[str], None]


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
    "triton": Format(_ignore_path(triton_cache.read_records), "Triton: *.autotune.json of its cache"),
    "helion": Format(helion.read_records, "Helion: HELION_AUTOTUNE_LOG's csv and meta.jsonl"),
    "vllm": Format(
        _ignore_path(vllm.read_records),
        "vLLM and SGLang: tuned configurations (JSON, or an archive)",
        runtime_note=vllm.RUNTIME_NOTE,
    ),
}
