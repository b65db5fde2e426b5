"""The formats by name: a reader of records, and what its kernels compute where the format itself says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewise.costmodel.data.importers import helion, inductor, kernel_tuner, triton_cache, tvm
from tilewise.costmodel.data.importers.description import MATRIX_PRODUCT, Description
from tilewise.costmodel.data.importers.record import Record
from tilewise.costmodel.data.importers.stream import Source

Skip = Callable[[str], None]


@dataclass(frozen=True)
class Format:
    """How the files of one tool are read."""

    read: Callable[[Source, Skip, Path], Iterator[Record]]
    written_by: str
    description: Description | None = None


def _alone(read: Callable[[Source, Skip], Iterator[Record]]) -> Callable[[Source, Skip, Path], Iterator[Record]]:
    return lambda source, skip, path: read(source, skip)


FORMATS: dict[str, Format] = {
    "kernel-tuner": Format(_alone(kernel_tuner.read), "Kernel Tuner: T4 files and caches"),
    "autotvm": Format(_alone(tvm.read_autotvm), "TVM's AutoTVM: logs"),
    "metaschedule": Format(_alone(tvm.read_metaschedule), "TVM's MetaSchedule: database_tuning_record.json"),
    "inductor": Format(_alone(inductor.read), "PyTorch: AutoHeuristic's text, feedback records", MATRIX_PRODUCT),
    "triton": Format(_alone(triton_cache.read), "Triton: *.autotune.json of its cache"),
    "helion": Format(helion.read, "Helion: HELION_AUTOTUNE_LOG's csv and meta.jsonl"),
}
