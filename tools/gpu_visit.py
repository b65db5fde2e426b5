"""Measure Triton kernels on a GPU machine for a few minutes, without installing tilewise.

    PYTHONPATH=src python3 -m tools.gpu_visit --minutes 8 --out DIR

It needs numpy, torch and triton, and no compiled part of tilewise. It writes a compressed copy of the store (in files
of 14 MiB), a summary and a log into DIR, every two minutes and at the end, so that an interrupted visit keeps its
measurements. `--resume` continues from such a copy; `--smoke` measures a few configurations only.
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
from tilewise.gpu.products.dispatch import rank_kernels
from tilewise.gpu.products.family import supports_tma
from tilewise.gpu.products.roofline import CUBLAS, SPLIT_K, TRANSPOSED, columns, features
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.aggregate import unpack_store
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Store
from tilewise.tune.measure.collector import Options, Tally, balanced, pick_configs
from tilewise.tune.measure.sampling import TimingSettings
from tilewise.tune.workloads import built_in_kernels
from tools.drawn_products import drawn_products

_FILE_BYTES = 14 << 20  # of one file of a compressed store: below the usual limits for attachments
_PRODUCT_CONFIGS = 110  # of each random product, half of them the best by a first estimate
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
    """List small problems of every family for Triton's interpreter."""
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
    """Print lines to the screen and to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class _Visit(TritonCollector):
    """A collector that also writes copies of its store from time to time, in a thread."""

    out: Path
    check: dict[str, list[Config]] | None = None  # a peer's configurations by problem; if set, the model is checked

    def _to_check(self, problem: Problem, fitting: list[Config], seed: int) -> list[Config]:
        """List the library, the model's first choices, a peer's, and some random configurations."""
        model, answers = shipped_runtime_model(), (self.check or {}).get(problem.key, [])
        best = rank_kernels(model, problem, self.shared_bytes, 36)[0] if model is not None else []
        others = pick_configs(fitting, 24, seed)[1:]
        return list(dict.fromkeys([CUBLAS, *best, *(c for c in answers if c in fitting), *others]))

    def _select_configs(self, family: TritonFamily, kernel: Kernel) -> list[Config]:
        """Choose the configurations of a product; other families are left to the collector."""
        if kernel.problem.family != "product":
            return super()._select_configs(family, kernel)
        if kernel.program == LIBRARY_ONLY:  # and one kernel, the same for all
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

    def report_progress(self, done: int, total: int, more: str = "") -> None:
        """Report progress, and copy the store every two minutes."""
        super().report_progress(done, total, more)
        now = time.monotonic()
        if now - max(self._copied, self.started) > _SNAPSHOT_SECONDS and self.deadline - now > 20:
            self.wait_for_copy()
            self._copying = threading.Thread(target=self._copy)
            self._copying.start()
            self._copied = now

    def _copy(self) -> None:
        with contextlib.suppress(TilewiseError, OSError), Store(self.store.path, create=False) as store:
            write_copy(store, self.out)  # an error is reported when the last copy is written

    def wait_for_copy(self) -> None:
        if self._copying is not None:
            self._copying.join()


def write_copy(store: Store, out: Path) -> list[Path]:
    """Write the store, compressed and in several files, into `out`; older files are replaced once all are complete."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        store.snapshot(copy)
        packed = gzip.compress(copy.read_bytes(), compresslevel=4)
    files = []
    for number, start in enumerate(range(0, len(packed), _FILE_BYTES)):
        path = out / f"store.sqlite.gz.{number:02d}"
        temporary = path.with_name(path.name + ".new")
        temporary.write_bytes(packed[start : start + _FILE_BYTES])
        files.append((temporary, path))
    for temporary, path in files:
        temporary.replace(path)
    return [path for _, path in files]


def unpack(files: Sequence[Path], target: Path) -> None:
    """Restore a store from its compressed files."""
    unpack_store(sorted(files), target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a visit and report errors in one sentence."""
    parser = argparse.ArgumentParser(
        description="Measure Triton kernels for a fixed time and write the store to a folder."
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="everything included; ends by itself before that")
    parser.add_argument("--out", type=Path, required=True, help="folder for the store's copy, summary and log")
    parser.add_argument("--store", type=Path, help="the live store (default: a temporary file)")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="store.sqlite.gz.* of an earlier visit")
    parser.add_argument("--smoke", action="store_true", help="a few configurations of one shape per family")
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--kernels", type=int, default=0, help="only so many of the embedded collection's kernels")
    parser.add_argument("--configs", type=int, default=0, help="only so many configurations a kernel")
    parser.add_argument("--thin", type=int, default=0, help="so many configurations of kernels that are trained on")
    parser.add_argument("--processes", type=int, default=0, help="compiling processes (default: cores - 2)")
    parser.add_argument("--products", type=int, default=0, help="so many random products, and twelve times as many "
                        "by the library alone, in place of the built-in programs")  # fmt: skip
    parser.add_argument("--check", type=Path, help="a peer's answers for the random products: the model's choices are "
                        "measured with them")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    log = _Log(options.out / "log.txt")
    try:
        return _visit(options, log)
    except TilewiseError as error:
        log(f"tilewise: {error}")
        return 2
    except KeyboardInterrupt:
        log("Stopped; the measurements have been written, and --resume continues from them.")
        return 130


def _choose(options: argparse.Namespace) -> list[Kernel]:
    """List the kernels to measure."""
    if options.device == "interpreter":
        return [Kernel("tiny", problem) for problem in tiny_problems()]
    if options.smoke:
        return [Kernel("smoke", problem) for problem in SMOKE]
    if options.products:
        return random_product_kernels(options.seed, options.products, 0 if options.check else 12 * options.products)
    kernels = built_in_kernels("triton")
    if not options.kernels:
        return kernels
    embedded = _embedded_names()
    repeated = [kernel for kernel in kernels if kernel.name in embedded]
    return balanced(repeated or kernels, options.seed)[: options.kernels]


# Combinations for which binaries are compiled; every further one costs some hundred binaries.
_COMPILED = {("bf16", "nt", "none"), ("bf16", "nn", "none"), ("bf16", "tn", "none"), ("fp16", "nt", "none"),
             ("bf16", "nt", "bias")}  # fmt: skip


def random_product_kernels(seed: int, count: int, library: int) -> list[Kernel]:
    """List random products, each in a program named after its kind, and more of them that only the library runs."""
    products: dict[str, Kernel] = {}
    library_only: dict[str, Kernel] = {}
    for kind, problem in drawn_products(seed):
        words = tuple(problem.word(name) for name in ("dtype", "layout", "epilogue"))
        common = words == ("bf16", "nt", "none") if kind == "odd" else words in _COMPILED
        if common and len(products) < count:
            products.setdefault(problem.key, Kernel(kind, problem))
        elif len(library_only) < library:
            library_only.setdefault(problem.key, Kernel(LIBRARY_ONLY, problem))
        elif len(products) == count:
            break
    return [*products.values(), *(kernel for key, kernel in library_only.items() if key not in products)]


def read_answers(path: Path) -> dict[str, list[Config]]:
    """Read the configurations that a peer would measure: [[problem, [config, ...]], ...]."""
    return {Problem(problem).key: [Config(c) for c in configs] for problem, configs in read_json_input(path)}


def _embedded_names() -> set[str]:
    """Name the kernels of the embedded GPU collection, which a second visit measures again for comparison."""
    path = embedded_folder() / "h200.npz"
    if not path.is_file():
        return set()
    return {member.kernel.name for members in read_collection(path).splits.values() for member in members}


def _table(tallies: dict[str, Tally]) -> list[str]:
    """Format one line per family."""
    lines = [f"{'family':16} {'kernels':>7} {'pairs':>7} {'scatter':>8} {'disturbed':>9} {'pairs/s':>8}  verdicts"]
    for name, tally in tallies.items():
        scatter = f"{statistics.median(tally.scatter):.2%}" if tally.scatter else "-"
        rate = f"{tally.pairs / tally.seconds:.0f}" if tally.seconds else "-"
        disturbed = f"{tally.disturbed}/{tally.batches}"
        verdicts = ", ".join(f"{status} {count}" for status, count in sorted(tally.verdicts.items()))
        lines.append(f"{name:16} {tally.kernels:7} {tally.pairs:7} {scatter:>8} {disturbed:>9} {rate:>8}  {verdicts}")
    return lines


def _visit(options: argparse.Namespace, log: _Log) -> int:
    """Measure until the time is over, then write the store, a table and a summary."""
    started = time.monotonic()
    minutes = min(options.minutes, 1.5) if options.smoke else options.minutes
    path = options.store or Path(tempfile.mkdtemp(prefix="tilewise-visit-")) / "store.sqlite"
    if options.resume:
        unpack(options.resume, path)
    collector_options = Options(
        minutes=minutes - 0.25,  # the last quarter minute is for writing the store
        seed=options.seed,
        device=options.device,
        processes=options.processes,
        verbose=options.smoke,
        max_configs=options.configs or (24 if options.smoke else 0),
        thin=options.thin,
        settings=TimingSettings(unit_ms=0.0, slowest_ms=1e6) if options.device == "interpreter" else TimingSettings(),
    )
    with Store(path) as store:
        _Visit.check = read_answers(options.check) if options.check else None
        visit = _Visit(_choose(options), store, collector_options, log)
        visit.out = options.out
        log(f"{len(visit.waiting)} kernels to measure, {len(visit.binaries())} binaries to compile")
        try:
            tallies = visit.run()
        finally:
            visit.wait_for_copy()
            files = write_copy(store, options.out)
        counts = store.counts()
    _log_results(log, tallies, options.smoke)
    elapsed = time.monotonic() - started
    log(
        f"store: {counts}; {sum(p.stat().st_size for p in files)} bytes in {len(files)} file(s); {elapsed:.0f} s in all"
    )
    _write_summary(options.out / "summary.json", tallies, counts, elapsed)
    return 0


def _log_results(log: _Log, tallies: dict[str, Tally], every: bool) -> None:
    """Log the table and the first failures of each family."""
    for line in _table(tallies):
        log(line)
    for tally in tallies.values():
        for failure in tally.failures[: 20 if every else 5]:
            log(f"  {failure}")


def _write_summary(path: Path, tallies: dict[str, Tally], counts: dict[str, int], elapsed: float) -> None:
    """Write the figures of each family as JSON."""
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
