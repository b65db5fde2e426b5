"""A short visit to a machine with a GPU: `PYTHONPATH=src python3 -m tools.gpu_visit --minutes 8 --out DIR`.

Needs numpy, torch and triton, and nothing of tilewise that must be compiled or installed. Writes into DIR a compressed
copy of the store (in parts of 14 MiB), a summary and a log, again every two minutes and at the end, so that a visit
cut short still brings its measurements home. `--resume` goes on from such a copy; `--smoke` is a first look.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tilewise._files import read_json_input
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import embedded_folder
from tilewise.errors import TilewiseError
from tilewise.gpu.families.family import TritonFamily
from tilewise.gpu.measure.collector import TritonCollector
from tilewise.gpu.measure.job import Settings
from tilewise.gpu.products.config_fields import CUBLAS, SPLIT_K, TRANSPOSED
from tilewise.gpu.products.dispatch import rank_kernels
from tilewise.gpu.products.family import supports_tma
from tilewise.gpu.products.roofline import columns, features
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.aggregate import unpack_store
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Store
from tilewise.tune.measure.collector import Options
from tilewise.tune.measure.schedule import Tally, balanced, pick_configs
from tilewise.tune.workloads.programs import built_in_kernels
from tools.drawn_products import drawn_products

_PART_BYTES = 14 << 20
_PRODUCT_CONFIGS = 110  # of each drawn product, half of them those that a first guess likes best
LIBRARY_ONLY = "library_only"
_SNAPSHOT_SECONDS = 120.0
SMOKE = (
    Problem.of("matmul", dtype="bf16", m=512, n=1024, k=1024, epilogue="none", layout="nt"),
    Problem.of("matmul", dtype="bf16", m=4096, n=4096, k=4096, epilogue="none", layout="nt"),
    Problem.of("matmul", dtype="fp16", m=197, n=1000, k=768, epilogue="bias_gelu", layout="nt"),
    Problem.of("matmul", dtype="tf32", m=512, n=1024, k=1024, epilogue="bias_relu", layout="nn"),
    Problem.of("matmul", dtype="bf16", m=768, n=768, k=2048, epilogue="none", layout="tn"),
    Problem.of("matmul", dtype="bf16", m=16, n=4096, k=4096, epilogue="residual", layout="nt"),
    Problem.of("batched_matmul", dtype="bf16", batch=24, m=256, n=256, k=64, epilogue="none", layout="nt"),
    Problem.of("attention", dtype="bf16", batch=2, heads=12, kv_heads=12, queries=512, keys=512, head=64, causal=1),
    Problem.of("attention", dtype="fp16", batch=1, heads=32, kv_heads=8, queries=300, keys=1024, head=128, causal=0),
    Problem.of("softmax", dtype="bf16", rows=4096, cols=1000),
    Problem.of("layer_norm", dtype="bf16", rows=4096, cols=768),
    Problem.of("rms_norm", dtype="fp32", rows=2048, cols=4096),
    Problem.of("reduction", dtype="bf16", rows=4096, cols=3072, axis=0, operation="sum"),
    Problem.of("reduction", dtype="fp32", rows=2048, cols=2048, axis=1, operation="max"),
)


def tiny_problems() -> list[Problem]:
    """For the interpreter: the same families at sizes it can walk through."""
    return [
        Problem.of("matmul", dtype="fp16", m=40, n=48, k=64, epilogue="bias_gelu", layout="nt"),
        Problem.of("product", dtype="fp16", m=24, n=48, k=256, epilogue="bias_relu", layout="nt"),
        Problem.of("batched_matmul", dtype="tf32", batch=2, m=20, n=24, k=32, epilogue="none", layout="nn"),
        Problem.of("attention", dtype="fp16", batch=1, heads=2, kv_heads=1, queries=20, keys=30, head=64, causal=1),
        Problem.of("softmax", dtype="fp32", rows=9, cols=200),
        Problem.of("layer_norm", dtype="fp16", rows=9, cols=130),
        Problem.of("rms_norm", dtype="fp32", rows=5, cols=300),
        Problem.of("reduction", dtype="fp32", rows=30, cols=40, axis=0, operation="sum"),
    ]


class _Log:
    """Lines to the screen and to a file, with the seconds since the start."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class _Visit(TritonCollector):
    """A collector that also brings copies of its store home now and then, while it goes on listening to the GPU."""

    out: Path
    check: dict[str, list[Config]] | None = None  # what a peer answers, by problem; given, the model is checked

    def _to_check(self, problem: Problem, fitting: list[Config], seed: int) -> list[Config]:
        """The library, the model's first choices, a peer's, and some at random."""
        model, answers = shipped_runtime_model(), (self.check or {}).get(problem.key, [])
        liked = rank_kernels(model, problem, self.shared_bytes, 36)[0] if model is not None else []
        others = pick_configs(fitting, 24, seed)[1:]
        return list(dict.fromkeys([CUBLAS, *liked, *(c for c in answers if c in fitting), *others]))

    def _select_configs(self, family: TritonFamily, kernel: Kernel) -> list[Config]:
        if kernel.problem.family != "product":
            return super()._select_configs(family, kernel)
        if kernel.program == LIBRARY_ONLY:  # and one kernel beside it, the same for all
            tile = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3, "group": 8}
            return [
                CUBLAS,
                Config({**tile, SPLIT_K: 1, "persistent": 0, TRANSPOSED: 0, "tma": int(supports_tma(kernel.problem))}),
            ]
        fitting = [c for c in family.configs(kernel.problem) if not family.misfit(kernel.problem, c, self.shared_bytes)]
        seed = self.options.seed + int(kernel.problem.digest[:8], 16)
        if self.check:
            return self._to_check(kernel.problem, fitting, seed)
        guesses = features(kernel.problem, columns(fitting[1:]))[:, 0]
        return pick_configs(fitting, _PRODUCT_CONFIGS, seed, [0.0, *guesses.tolist()])

    _copied: float = 0.0
    _copying: threading.Thread | None = None

    def tell(self, done: int, total: int, more: str = "") -> None:
        """Report progress, and copy the store every two minutes."""
        super().tell(done, total, more)
        now = time.monotonic()
        if now - max(self._copied, self.started) > _SNAPSHOT_SECONDS and self.deadline - now > 20:
            self.wait_for_copy()
            self._copying = threading.Thread(target=self._copy)
            self._copying.start()
            self._copied = now

    def _copy(self) -> None:
        with contextlib.suppress(TilewiseError, OSError), Store(self.store.path, create=False) as store:
            bring_home(store, self.out)  # what goes wrong here is said when the last copy is made

    def wait_for_copy(self) -> None:
        if self._copying is not None:
            self._copying.join()


def bring_home(store: Store, out: Path) -> list[Path]:
    """Write the store, compressed and in parts, into `out`; older parts are replaced when the new ones are whole."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        store.snapshot(copy)
        packed = gzip.compress(copy.read_bytes(), compresslevel=4)
    parts = []
    for number, start in enumerate(range(0, len(packed), _PART_BYTES)):
        path = out / f"store.sqlite.gz.{number:02d}"
        beside = path.with_name(path.name + ".new")
        beside.write_bytes(packed[start : start + _PART_BYTES])
        parts.append((beside, path))
    for beside, path in parts:
        beside.replace(path)
    return [path for _, path in parts]


def unpack(parts: Sequence[Path], target: Path) -> None:
    """The store from its compressed parts."""
    unpack_store(sorted(parts), target)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure Triton kernels for a fixed time and bring the store home.")
    parser.add_argument("--minutes", type=float, default=8.0, help="everything included; ends by itself before that")
    parser.add_argument("--out", type=Path, required=True, help="folder for the store's copy, summary and log")
    parser.add_argument("--store", type=Path, help="where the live store lies (default: a temporary file)")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="store.sqlite.gz.* of an earlier visit")
    parser.add_argument("--smoke", action="store_true", help="a few configurations of one shape per family")
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--kernels", type=int, default=0, help="only so many of the embedded collection's kernels")
    parser.add_argument("--configs", type=int, default=0, help="only so many configurations a kernel")
    parser.add_argument("--thin", type=int, default=0, help="so many configurations of kernels that are trained on")
    parser.add_argument("--processes", type=int, default=0, help="compiling processes (default: cores - 2)")
    parser.add_argument("--products", type=int, default=0, help="so many drawn products, and twelve times as many "
                        "by the library alone, in place of the built-in programs")  # fmt: skip
    parser.add_argument("--check", type=Path, help="a peer's answers for the drawn products: the model's choices are "
                        "measured with them")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    log = _Log(given.out / "log.txt")
    try:
        return _visit(given, log)
    except TilewiseError as error:
        log(f"tilewise: {error}")
        return 2
    except KeyboardInterrupt:
        log("Stopped; what was measured has been brought home, and --resume goes on from it.")
        return 130


def _choose(given: argparse.Namespace) -> list[Kernel]:
    if given.device == "interpreter":
        return [Kernel("tiny", problem) for problem in tiny_problems()]
    if given.smoke:
        return [Kernel("smoke", problem) for problem in SMOKE]
    if given.products:
        return drawn(given.seed, given.products, 0 if given.check else 12 * given.products)
    kernels = built_in_kernels("triton")
    if not given.kernels:
        return kernels
    known = _embedded_names()
    again = [kernel for kernel in kernels if kernel.name in known]
    return balanced(again or kernels, given.seed)[: given.kernels]


# What binaries are compiled for; every further combination costs some hundred of them.
_COMPILED = {("bf16", "nt", "none"), ("bf16", "nn", "none"), ("bf16", "tn", "none"), ("fp16", "nt", "none"),
             ("bf16", "nt", "bias")}  # fmt: skip


def drawn(seed: int, count: int, library: int) -> list[Kernel]:
    """Drawn products, each in a program named for its kind; and more of them that only the library runs."""
    measured: dict[str, Kernel] = {}
    alone: dict[str, Kernel] = {}
    for kind, problem in drawn_products(seed):
        words = tuple(problem.word(name) for name in ("dtype", "layout", "epilogue"))
        common = words == ("bf16", "nt", "none") if kind == "odd" else words in _COMPILED
        if common and len(measured) < count:
            measured.setdefault(problem.key, Kernel(kind, problem))
        elif len(alone) < library:
            alone.setdefault(problem.key, Kernel(LIBRARY_ONLY, problem))
        elif len(measured) == count:
            break
    return [*measured.values(), *(kernel for key, kernel in alone.items() if key not in measured)]


def read_answers(path: Path) -> dict[str, list[Config]]:
    """What a peer would measure, by problem: [[problem, [config, ...]], ...]."""
    return {Problem(problem).key: [Config(c) for c in configs] for problem, configs in read_json_input(path)}


def _embedded_names() -> set[str]:
    """The kernels of the embedded GPU collection: a short second visit measures those, to be compared with it."""
    path = embedded_folder() / "h200.npz"
    if not path.is_file():
        return set()
    return {measured.kernel.name for members in read_collection(path).splits.values() for measured in members}


def _table(tallies: dict[str, Tally]) -> list[str]:
    """One line a family."""
    lines = [f"{'family':16} {'kernels':>7} {'pairs':>7} {'scatter':>8} {'disturbed':>9} {'pairs/s':>8}  verdicts"]
    for name, tally in tallies.items():
        scatter = f"{statistics.median(tally.scatter):.2%}" if tally.scatter else "-"
        rate = f"{tally.pairs / tally.seconds:.0f}" if tally.seconds else "-"
        disturbed = f"{tally.disturbed}/{tally.batches}"
        verdicts = ", ".join(f"{status} {count}" for status, count in sorted(tally.verdicts.items()))
        lines.append(f"{name:16} {tally.kernels:7} {tally.pairs:7} {scatter:>8} {disturbed:>9} {rate:>8}  {verdicts}")
    return lines


def _visit(given: argparse.Namespace, log: _Log) -> int:
    started = time.monotonic()
    minutes = min(given.minutes, 1.5) if given.smoke else given.minutes
    path = given.store or Path(tempfile.mkdtemp(prefix="tilewise-visit-")) / "store.sqlite"
    if given.resume:
        unpack(given.resume, path)
    options = Options(
        minutes=minutes - 0.25,  # the last quarter minute is for the way home
        seed=given.seed,
        device=given.device,
        processes=given.processes,
        verbose=given.smoke,
        max_configs=given.configs or (24 if given.smoke else 0),
        thin=given.thin,
        settings=Settings(unit_ms=0.0, slowest_ms=1e6) if given.device == "interpreter" else Settings(),
    )
    with Store(path) as store:
        _Visit.check = read_answers(given.check) if given.check else None
        visit = _Visit(_choose(given), store, options, log)
        visit.out = given.out
        log(f"{len(visit.waiting)} kernels to measure, {len(visit.binaries())} binaries to compile")
        try:
            tallies = visit.run()
        finally:
            visit.wait_for_copy()
            parts = bring_home(store, given.out)
        counts = store.counts()
    _tell(log, tallies, given.smoke)
    elapsed = time.monotonic() - started
    log(
        f"store: {counts}; {sum(p.stat().st_size for p in parts)} bytes in {len(parts)} part(s); {elapsed:.0f} s in all"
    )
    _write_summary(given.out / "summary.json", tallies, counts, elapsed)
    return 0


def _tell(log: _Log, tallies: dict[str, Tally], every: bool) -> None:
    for line in _table(tallies):
        log(line)
    for tally in tallies.values():
        for failure in tally.failures[: 20 if every else 5]:
            log(f"  {failure}")


def _write_summary(path: Path, tallies: dict[str, Tally], counts: dict[str, int], elapsed: float) -> None:
    families = {
        name: {
            "kernels": tally.kernels,
            "pairs": tally.pairs,
            "median_scatter": statistics.median(tally.scatter) if tally.scatter else None,
            "batches": tally.batches,
            "disturbed": tally.disturbed,
            "seconds": tally.seconds,
            "verdicts": dict(tally.verdicts),
            "failures": tally.failures,
        }
        for name, tally in tallies.items()
    }
    path.write_text(json.dumps({"seconds": elapsed, "counts": counts, "families": families}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
