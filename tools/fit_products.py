"""Fit the cost model that chooses the path and the tile of a float32 product, and evaluate it on held-out machines.

    python -m tools.fit_products                       # leave one machine out, and one third of the shapes
    python -m tools.fit_products --write               # fit to all timings; writes native/common/product_terms.h

The model is linear: predicted time = sum of coefficient x count. The extension counts (`native.matmul_terms`), so that
the model exists once. `tools/data/products.csv.xz` holds the timings, in two sets: `paths` has every feasible path of
randomly drawn products, `tiles` a random draw of tiles. The column `rules` marks what the hand-written rules chose that
this model replaced; they are kept as a recorded baseline only.

The loss is a robust regression of log runtimes within a product, slow candidates weighing less, plus the expected loss
of time if the choice is drawn from a softmax of the predictions. Coefficients are positive: logarithms are fitted.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise.backend.tiled.matmul import TileConfig
from tilewise.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
TIMINGS = ROOT / "tools" / "data" / "products.csv.xz"
RESULTS = ROOT / "benchmarks" / "results" / "product_choice.json"
TERMS = ROOT / "native" / "common" / "product_terms.h"
# Caches of the machines in the data, as `native.pretend_machine` takes them: bytes of L1, L2, L3, and cores.
MACHINES = {"zen5": (48 << 10, 1 << 20, 32 << 20, 2), "xeon": (48 << 10, 2 << 20, 300 << 20, 16),
            "spr": (48 << 10, 2 << 20, 480 << 20, 2)}  # fmt: skip
COLUMNS = ("set", "machine", "isa", "threads", "m", "n", "k", "layout", "path", "tail", "mr", "nr", "mc", "kc",
           "pack_a", "pack_b", "threads_m", "threads_n", "rules", "ns")  # fmt: skip
TERM_LINE = re.compile(r"^  X\((\w+), ([-+.\de]+)\) *(/\*.*?\*/)? *\\?$", re.MULTILINE)


TILES, PATHS = "tiles", "paths"
Candidate = tuple[str, str]  # the path and the number of last columns that are computed separately


@dataclass
class TimedProduct:
    """One product on one machine: the counts and the log runtimes of its candidates."""

    kind: str  # TILES or PATHS
    machine: str
    isa: str
    threads: int
    candidates: list[Candidate]
    counts: np.ndarray  # (candidates, terms)
    one_thread: np.ndarray  # (candidates, terms): the counts if one thread computes the product
    log_ns: np.ndarray  # (candidates,)
    by_rules: int | None  # the candidate that the hand-written rules chose
    threaded: TimedProduct | None = None  # the same product on the most threads that it was timed on

    def choose(self, weights: np.ndarray) -> int:
        """Return the candidate that the extension would choose with these coefficients."""
        if self.kind == TILES:
            return int(np.argmin(self.counts @ weights))
        cost = self.one_thread @ weights
        if self.threaded is None:
            return int(np.argmin(cost))
        # The number of threads must not change a bit of the result, so that a path is chosen for one and for many.
        many = dict(zip(self.threaded.candidates, self.threaded.counts @ weights, strict=True))
        return int(np.argmin(cost * np.array([many.get(candidate, math.inf) for candidate in self.candidates])))


def operands(m: int, n: int, k: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return uninitialized operands of a product whose layout is nn, nt, tn or tt."""
    a = np.empty((m, k) if layout[0] == "n" else (k, m), np.float32)
    b = np.empty((k, n) if layout[1] == "n" else (n, k), np.float32)
    return a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T


def shipped_coefficients() -> dict[str, float]:
    """Read the terms and their shipped coefficients from the C++ header."""
    return {name: float(value) for name, value, _ in TERM_LINE.findall(TERMS.read_text())}


def count(row: dict[str, str], threads: int) -> list[float] | None:
    """Count what a recorded candidate does; None if it is not a configuration of this version."""
    a, b = operands(int(row["m"]), int(row["n"]), int(row["k"]), row["layout"])
    config: str | TileConfig = row["path"]
    if row["pack_a"] == "1" and row["pack_b"] == "0":  # never considered
        return None
    if row["path"] == "tiled":
        mr, nr, mc, kc = (int(row[name]) for name in ("mr", "nr", "mc", "kc"))
        grid = (int(row["threads_m"]), int(row["threads_n"])) if threads > 1 else (1, 1)
        config = TileConfig(
            mr=mr, nr=nr, mc=mc, nc=4096 // nr * nr, kc=kc, pack_a=row["pack_a"] == "1", pack_b=row["pack_b"] == "1",
            threads_m=grid[0], threads_n=grid[1],
        )  # fmt: skip
    native.set_num_threads(threads)
    try:
        return native.matmul_terms(a, b, config, int(row["tail"]))
    except ConfigurationError:
        return None


def read_products(path: Path = TIMINGS) -> list[TimedProduct]:
    """Read the timings and count each candidate as on the machine that it was timed on."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with lzma.open(path, "rt") as file:
        for row in csv.DictReader(file):
            groups.setdefault(tuple(row[name] for name in COLUMNS[:8]), []).append(row)
    products: dict[tuple[str, ...], TimedProduct] = {}
    for key, rows in groups.items():
        kind, machine, isa, threads = *key[:3], int(key[3])
        native.pretend_machine(*MACHINES[machine])
        native.set_isa(isa)
        pairs = [(row, counts) for row in rows if (counts := count(row, threads))]
        if len(pairs) < 2:
            continue
        by_rules = [i for i, (row, _) in enumerate(pairs) if row["rules"] == "1"]
        products[key] = TimedProduct(
            kind=kind, machine=machine, isa=isa, threads=threads,
            candidates=[(row["path"], row["tail"]) for row, _ in pairs],
            counts=np.array([counts for _, counts in pairs]),
            one_thread=np.array([count(row, 1) for row, _ in pairs]),
            log_ns=np.log([float(row["ns"]) for row, _ in pairs]),
            by_rules=by_rules[0] if by_rules else None,
        )  # fmt: skip
    most = max((int(key[3]) for key in products), default=1)
    for key, product in products.items():
        product.threaded = next(
            (p for n in range(most, 1, -1) if (p := products.get((*key[:3], str(n), *key[4:])))), None
        )
    return list(products.values())


def fit(products: list[TimedProduct], start: np.ndarray, free: np.ndarray, steps: int = 600) -> np.ndarray:
    """Return coefficients that order the candidates of these products best; those not free keep their ratios."""
    slow, temperature, worst = 0.4, 0.05, 1.5  # log runtimes: decay of weights, softness of a choice, most that counts
    counts = torch.tensor(np.concatenate([p.counts for p in products]))
    log_ns = torch.tensor(np.concatenate([p.log_ns for p in products]))
    excess = torch.tensor(np.concatenate([p.log_ns - p.log_ns.min() for p in products]))
    group = torch.tensor(np.repeat(np.arange(len(products)), [len(p.log_ns) for p in products]))
    weight = torch.exp(-excess / slow)

    def by_product(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(products), dtype=values.dtype).index_add(0, group, values)

    weights, base = by_product(weight), torch.tensor(np.log(start))
    logarithms, scale = base.clone().requires_grad_(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logarithms, scale], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        coefficients = torch.exp(torch.where(torch.tensor(free), logarithms, base + scale))
        predicted = torch.log(counts @ coefficients + 1e-9)
        # Machines differ in clock: only differences within a product count.
        error = predicted - log_ns
        error = error - (by_product(error * weight) / weights)[group]
        robust = torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error), beta=0.1, reduction="none")
        loss = (weight * robust).sum() / weight.sum()
        if step > steps // 4:
            least = torch.full((len(products),), math.inf, dtype=torch.float64)
            least = least.scatter_reduce(0, group, predicted.detach(), "amin")
            odds = torch.exp(-(predicted - least[group]) / temperature)
            chance = odds / by_product(odds)[group]
            loss = loss + 2 * by_product(chance * excess.clamp(max=worst)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return np.asarray(coefficients.detach().numpy())


def fit_all(products: list[TimedProduct], start: np.ndarray, refit_tiles: bool) -> np.ndarray:
    """Fit the terms of the tiled loops to tiles if asked to, then the other terms to paths."""
    names = list(shipped_coefficients())
    in_loops = np.arange(len(start)) <= names.index("a_from_l3")
    for_threads = np.array([name == "task" for name in names])  # paths and tiles compete in it
    if refit_tiles:
        start = fit([p for p in products if p.kind == TILES], start, in_loops)
    return fit([p for p in products if p.kind == PATHS], start, ~in_loops | for_threads)


def losses(products: Iterable[TimedProduct], weights: np.ndarray | None) -> np.ndarray:
    """Return log(fastest / chosen) of each product: of the model, or of the recorded rules without one."""
    values = []
    for p in products:
        choice = p.by_rules if weights is None else p.choose(weights)
        values.append(math.nan if choice is None else p.log_ns.min() - p.log_ns[choice])
    return np.array(values)


def report(name: str, products: list[TimedProduct], weights: np.ndarray) -> list[dict[str, Any]]:
    """Print and return how near the choices come to the fastest candidate, for each set of timings."""
    rows = []
    for key in sorted({(p.kind, p.machine, p.isa, p.threads) for p in products}):
        members = [p for p in products if (p.kind, p.machine, p.isa, p.threads) == key]
        learned, rules = losses(members, weights), losses(members, None)
        numbers = {"learned": learned.mean(), "learned_slowest": np.quantile(learned, 0.01)}
        if not np.isnan(rules).all():  # newer timings have no rules to compare with
            gain = (learned - rules)[~np.isnan(rules)]
            draws = np.random.default_rng(0).choice(gain, (2000, len(gain))).mean(1)
            numbers |= {
                "rules": np.nanmean(rules), "rules_slowest": np.nanquantile(rules, 0.01),
                "gain": gain.mean(), "low": np.percentile(draws, 2.5), "high": np.percentile(draws, 97.5),
            }  # fmt: skip
        rounded = {column: round(math.exp(value), 4) for column, value in numbers.items()}
        labels = dict(zip(("set", "machine", "isa", "threads"), key, strict=True))
        rows.append({"held_out": name, **labels, "products": len(members), **rounded})
        print("  ".join(f"{column} {value}" for column, value in rows[-1].items()))
    return rows


def evaluate(products: list[TimedProduct], start: np.ndarray) -> None:
    """Evaluate machines that were left out, then shapes that were left out; write the file of docs/tiles.md."""
    rows = []
    for machine in MACHINES:
        train = [p for p in products if p.machine != machine]
        test = [p for p in products if p.machine == machine]
        rows += report("machine", test, fit_all(train, start, refit_tiles=True))
    held_out = np.random.default_rng(0).random(len(products)) < 1 / 3
    train = [p for p, out in zip(products, held_out, strict=True) if not out]
    test = [p for p, out in zip(products, held_out, strict=True) if out]
    rows += report("shapes", test, fit_all(train, start, refit_tiles=True))
    write_atomic(RESULTS, (json.dumps(rows, indent=1) + "\n").encode())


def write_coefficients(weights: np.ndarray) -> None:
    """Replace the coefficients in the C++ header."""
    values = dict(zip(shipped_coefficients(), weights, strict=True))

    def line(match: re.Match[str]) -> str:
        entry = f"  X({match[1]}, {values[match[1]]:.4g})"
        return (entry.ljust(31) + (match[3] or "")).ljust(117) + ("\\" if match[0].endswith("\\") else "")

    write_atomic(TERMS, "\n".join(s.rstrip() for s in TERM_LINE.sub(line, TERMS.read_text()).split("\n")).encode())


def main() -> None:
    """Evaluate the model, or fit and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="fit to all timings and write the C++ header")
    parser.add_argument("--tiles", action="store_true", help="with --write: refit the terms of the tiled loops too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    products, start = read_products(), np.array(list(shipped_coefficients().values()))
    if not options.write:
        return evaluate(products, start)
    weights = fit_all(products, start, options.tiles)
    report("fitted to all", products, weights)
    write_coefficients(weights)


if __name__ == "__main__":
    main()
