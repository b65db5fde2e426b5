"""`tilewise tour`: what the package does, shown on this machine with the data that came with it.

Each stop measures something here and prints it; nothing is remembered from elsewhere. A stop whose part is not
installed says so and the tour goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tilewise._extension import native
from tilewise.errors import TilewiseError

Facts = dict[str, Any]


def tour(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, about 30 seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Show what tilewise does on this machine: its ceilings, a matrix product, a CNN, a GPT, and ranked tiles.

    Example: tilewise tour --quick
    """
    stops: list[tuple[str, Callable[[bool], tuple[Facts, list[str]]]]] = [
        ("This machine", _machine),
        ("One matrix product, rung by rung", _ladder),
        ("A CNN on handwritten digits", _cnn),
        ("A GPT that writes about Python", _gpt),
        ("Which tile is fastest? Ranked without running", _tiles),
    ]
    found: Facts = {}
    for number, (title, stop) in enumerate(stops, 1):
        if not as_json:
            print(f"\n{number}. {title}", flush=True)
        try:
            facts, lines = stop(quick)
        except TilewiseError as error:
            facts, lines = {"skipped": str(error)}, [f"Not shown: {error}"]
        found[stop.__name__.removeprefix("_")] = facts
        if not as_json:
            print("\n".join(f"   {line}" for line in lines), flush=True)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\nGo on with `tilewise --help`, README.md and docs/.")


def _machine(_quick: bool) -> tuple[Facts, list[str]]:
    from tilewise.profile.machine import active_isa, machine

    ceilings = machine()
    peak, bandwidth = ceilings.peak(), ceilings.memory_bandwidth()
    facts = {"isa": active_isa(), "gflops": peak / 1e9, "read_gb_per_s": bandwidth / 1e9}
    return facts, [
        f"Instruction set {active_isa()}; one thread does {peak / 1e9:.0f} GFLOP/s, reading {bandwidth / 1e9:.0f} GB/s "
        "from memory.",
        "Every speed below is limited by one of the two.",
    ]


def _ladder(quick: bool) -> tuple[Facts, list[str]]:
    import numpy as np

    from tilewise.backend import matmul_blocked, matmul_naive, matmul_native, matmul_numpy

    rng, n = np.random.default_rng(0), 512
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    small = 48 if quick else 96
    rungs = {
        "Python loops": (lambda: matmul_naive(a[:small, :small], b[:small, :small]), small),
        "cache-blocked": (lambda: matmul_blocked(a, b), n),
    }
    if native is not None:
        rungs["tilewise native"] = (lambda: matmul_native(a, b), n)
    rungs["NumPy's library"] = (lambda: matmul_numpy(a, b), n)
    facts = {
        name: 2 * size**3 / _seconds(run, 1 if name == "Python loops" else 5) / 1e9
        for name, (run, size) in rungs.items()
    }
    slowest = facts["Python loops"]
    lines = [f"{name:26s} {rate:9.3f} GFLOP/s  {rate / slowest:9,.0f}×" for name, rate in facts.items()]
    return facts, [*lines, "`tilewise ladder` shows every rung, with a picture."]


def _cnn(quick: bool) -> tuple[Facts, list[str]]:
    import numpy as np

    from tilewise import Tensor, data, models, no_grad
    from tilewise.backend import use_backend
    from tilewise.quantize import quantize

    model, digits = models.pretrained("cnn").eval(), data.digits()
    x, labels, batch = digits.x_test, digits.y_test, digits.x_test[:64]
    int8 = quantize(model, [digits.x_train[:256]])

    def accuracy(network: Any) -> float:
        with no_grad():
            return float((np.asarray(network(Tensor(x))).argmax(1) == labels).mean())

    def latency(network: Any) -> float:
        with no_grad():
            return _seconds(lambda: network(Tensor(batch)), 10 if quick else 40)

    with use_backend("numpy"):
        plain = latency(model)
    if native is None:
        times = {"plain NumPy float32": plain, "NumPy int8": latency(int8)}
    else:
        times = {"plain NumPy float32": plain, "native float32": latency(model), "native int8": latency(int8)}
    scores = {name: accuracy(int8 if "int8" in name else model) for name in times}
    lines = [
        f"{name:22s} {times[name] * 1e3:7.2f} ms for 64 images  {plain / times[name]:5.1f}×  "
        f"accuracy {100 * scores[name]:.1f} %"
        for name in times
    ]
    return {"seconds": times, "accuracy": scores}, lines


def _gpt(quick: bool) -> tuple[Facts, list[str]]:
    from tilewise import data, models
    from tilewise.generate import generate

    model, prompt, count = models.pretrained("gpt"), "The import statement", 60 if quick else 200
    ids = data.encode(prompt)
    start = time.perf_counter()
    cached = list(generate(model, ids, count))
    with_cache = time.perf_counter() - start
    start = time.perf_counter()
    uncached = list(generate(model, ids, count, use_cache=False))
    without = time.perf_counter() - start
    facts = {
        "tokens": count,
        "cached_s": with_cache,
        "uncached_s": without,
        "same_tokens": cached == uncached,
        "text": data.decode(cached),
    }
    verdict = "the same tokens" if cached == uncached else "OTHER TOKENS"
    sample = (prompt + data.decode(list(generate(model, ids, 120, temperature=0.6)))).replace("\n", "\n   | ")
    return facts, [
        f"{count} tokens: {count / without:,.0f} a second computing everything again, {count / with_cache:,.0f} with a "
        f"key/value cache: {without / with_cache:.1f}×, {verdict}.",
        f"| {sample}",
    ]


def _tiles(_quick: bool) -> tuple[Facts, list[str]]:
    from tilewise.costmodel.shipped import tour_of_the_shipped_model

    facts, lines = tour_of_the_shipped_model()
    return facts, lines


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
