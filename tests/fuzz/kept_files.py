"""What tilewise keeps for itself between runs and finds again, damaged: records, calibrations, results of trials.

Most of it is left alone where it cannot be read, and the run goes on without; `RESUMED` names those targets.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import in_json, in_lines, in_store
from fuzz.targets import TENSORS, Target, _store, run, target

RESUMED = ("learn_progress", "sweep_result")


@target
def four_bits(folder: Path) -> Target:
    from tilewise import models
    from tilewise.quantize import load_four_bits, quantize, save_four_bits

    model = models.mlp().eval()
    save_four_bits(quantize(model, [np.ones((4, 64), np.float32)], bits=4, symmetric=False), folder / "x")
    return Target(folder / "x", lambda path: run(load_four_bits(model, path), 2, 64), TENSORS)


@target
def loop_description(folder: Path) -> Target:
    from costmodel.data.importers import test_importers

    from tilewise.costmodel.data.importers import import_logs
    from tilewise.costmodel.data.importers.description import read_description

    (folder / "log.json").write_text(test_importers.t4())
    loops = {"loops": {"i": "m", "j": 64, "k": 32}, "operands": [["i", "k"], ["k", "j"]], "result": ["i", "j"]}
    more = {"tile": {"i": ["block_size_x"], "j": ["block_size_y", "work"]}, "operation": "dot", "dtype": "f16"}
    (folder / "d.json").write_text(json.dumps(loops | more))

    def use(path: Path) -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        import_logs("kernel-tuner", [folder / "log.json"], folder / "out", description=read_description(path))

    return Target(folder / "d.json", use, (in_json,))


@target
def recorded_products(folder: Path) -> Target:
    from benchmarks.recorded import as_json, lines, read_recorded, table
    from tests.gpu.products.test_recorded import RECORDED
    from tilewise.gpu.products.runtime_model import shipped_runtime_model

    model = shipped_runtime_model()
    assert model is not None
    (folder / "r.json").write_text(json.dumps(as_json(read_recorded(RECORDED)[:2], {"name": "H200"})))
    return Target(folder / "r.json", lambda path: list(lines(table(model, read_recorded(path)))), (in_json,))


@target
def compiled_problems(folder: Path) -> Target:
    from benchmarks.compiled import lines, read_compiled

    times = {"tilewise": 10.0, "aten": 11.0, "max-autotune": 9.5}
    row = {"name": "mm 8x16x32", "kind": "few rows", "us": times, "seconds": {"tilewise": 0.5, "max-autotune": 8.0}}
    (folder / "c.json").write_text(json.dumps({"problems": [row, row | {"name": "bmm"}]}))
    return Target(folder / "c.json", lambda path: lines(read_compiled(path)), (in_json,))


@target
def inductor_records(folder: Path) -> Target:
    from tilewise.gpu.inductor.decision_log import DecisionLog, report
    from tilewise.gpu.inductor.templates import Reason, Selection
    from tilewise.gpu.products.roofline import CUBLAS
    from tilewise.store.problem import Config, Problem

    problem = Problem.of("inductor", op="mm", batch=1, m=8, n=16, k=32, dtype="bf16", layout="nt", epilogue="none")
    tile = Config.of(block_m=16, block_n=32, block_k=64, warps=4, stages=3, group=8, tma=0)
    log = DecisionLog("a machine", folder)
    for reason in (Reason.BENCHMARK, Reason.CERTAIN, Reason.EARLIER_WINNER):
        log.add_decision(problem, Selection((0, 1), reason, 100, 1e-3))
    log.add_measurements(problem, [(CUBLAS, 2e-5), (tile, 1e-5)], 0.5)
    return Target(folder / "decisions.jsonl", lambda path: report(folder), (in_lines,))


@target
def sweep_result(folder: Path) -> Target:
    from tilewise_fleet.sweep import best_of, read_result

    trial = {"trial": 0, "draw": 0, "fold": 0, "seed": 1, "learning_rate": 1e-3}
    (folder / "result.json").write_text(json.dumps({**trial, "value": 0.9, "epochs": 3, "seconds": 1.0}))

    def use(path: Path) -> None:
        result = read_result(path, trial)
        if result is not None:
            best_of([result])

    return Target(folder / "result.json", use, (in_json,))


@target
def learn_progress(folder: Path) -> Target:
    import os

    from tilewise.learn.notebook import lines, where

    os.environ["TILEWISE_CACHE"] = str(folder)
    where().parent.mkdir()
    where().write_text(json.dumps({"quantization": {"scale": "2026-01-01T00:00:00+00:00"}, "pruning": {}}))
    return Target(where(), lambda path: lines(), (in_json,))


@target
def merged_store(folder: Path) -> Target:
    from tilewise.store.merge import merge
    from tilewise.store.store import Store

    place = _store(folder)

    def use(path: Path) -> Any:
        for old in (*folder.glob("into.sqlite*"), *folder.glob(f"{path.name}-*")):
            old.unlink()
        with Store(path, create=False) as source, Store(folder / "into.sqlite") as into:
            return merge(source, into)

    return Target(place, use, (in_store,))


def _lab_record() -> dict[str, Any]:
    """The record of a lab with one prediction, its measurement and a decision, on an invented machine."""
    from tilewise.learn.labs.questions import QUESTIONS
    from tilewise.learn.labs.record import FORMAT, drawn_sizes, machine_key, seal

    machine = {"cpu": "a CPU", "isa": "avx2", "flops_per_second": 1e11, "bytes_per_second": 2e10}
    record: dict[str, Any] = {"format": FORMAT, "lesson": "caching", "student": "ada", "machine": machine}
    question = QUESTIONS["caching"][0]
    shared = {"question": question.name, "attempt": 1, "sizes": drawn_sizes(record, question, 1), "when": "2026-01-01"}
    entries: list[dict[str, Any]] = [
        {"kind": "prediction", "value": 10.0, "limit": "memory", **shared},
        {"kind": "measurement", "value": 12.0, **shared},
        {"kind": "decision", "numbers": "12 times", "why": "memory", "trade_off": "bytes", "when": "2026-01-01"},
    ]
    previous = machine_key(machine)
    for entry in entries:
        plain = json.loads(json.dumps(entry))
        entry.update(plain)
        previous = entry["seal"] = seal(previous, plain)
    return record | {"entries": entries}


@target
def lab_record(folder: Path) -> Target:
    from tilewise.cli.lessons import _print_statistics
    from tilewise.learn.labs.labwork import Lab

    place = folder / "lab-caching.json"
    place.write_text(json.dumps(_lab_record()))

    def use(path: Path) -> None:
        Lab("caching", path).grade()
        _print_statistics(path.parent, True)

    return Target(place, use, (in_json,))


@target
def lab_token(folder: Path) -> Target:
    import base64
    import zlib

    from tilewise._files import read_text_input
    from tilewise.learn.labs.labwork import read_token
    from tilewise.learn.labs.record import grade

    place = folder / "token.txt"
    place.write_bytes(base64.b85encode(zlib.compress(json.dumps(_lab_record()).encode())))
    return Target(place, lambda path: grade(read_token(read_text_input(path, 1 << 20))))
