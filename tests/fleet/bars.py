"""The service's figures on one core: choices a second, known and not, and how long one takes at 1,000 a second.

    python -m tests.fleet.bars [--seconds 5] [--store postgresql://...] [--out benchmarks/results/fleet.json]

The service has the last core to itself, whoever asks has the others. Known: the problem was asked for before and is
measured. Not known: a new product every time, with 500 configurations. Then what a store takes in: batches of twenty
timings from one process, each on the disk before the next is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_class, today
from tests.bench.postgres import running_cluster
from tests.fleet.served import ServedStore
from tests.store.stores import why_no_postgres
from tilewise._atomic import write_atomic
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store

GPU = {"kind": "triton", "identity": "NVIDIA H200"}
CONNECTIONS = 16


def problem(m: int, k: int = 512) -> Problem:
    return get_family("matmul").problem({"family": "matmul", "m": m, "n": 1024, "k": k})


def tiles(count: int) -> list[dict[str, Any]]:
    """So many settings; the model does not mind that some of them would not fit."""
    configs = [dict(config) for config in get_family("matmul").configs(problem(512))]
    more = itertools.cycle(configs)
    while len(configs) < count:
        configs.append({**next(more), "group": 1 + len(configs) % 61})
    return configs[:count]


class Caller(asyncio.Protocol):
    """Keeps one connection busy: the next request goes out when the answer to the last is in."""

    def __init__(self, requests: Any, answered: Any) -> None:
        self._requests, self._answered, self._received, self._need = requests, answered, bytearray(), 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(self._received) < end + 4 + length:
            return
        assert b" 200 " in head.split(b"\r\n")[0], bytes(self._received)
        self._received.clear()
        self._answered(self, time.perf_counter() - self._sent)


def request(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return (
        b"POST /choose HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )


async def as_fast_as_it_goes(port: int, requests: Any, seconds: float) -> list[float]:
    """Every answer's seconds, with a request under way on each connection."""
    request_seconds: list[float] = []
    until = time.perf_counter() + seconds

    def answered(caller: Caller, took: float) -> None:
        request_seconds.append(took)
        if time.perf_counter() < until:
            caller.ask()

    loop = asyncio.get_running_loop()
    for _ in range(CONNECTIONS):
        _, caller = await loop.create_connection(lambda: Caller(requests, answered), "127.0.0.1", port)
        caller.ask()
    await asyncio.sleep(seconds + 0.2)
    return request_seconds


async def at_a_rate(port: int, requests: Any, seconds: float, rate: float) -> list[float]:
    """Seconds from when a request was due to its answer, so that one that has to wait is counted whole."""
    request_seconds: list[float] = []
    idle: list[Caller] = []
    due: list[float] = []
    started: dict[int, float] = {}

    def send() -> None:
        while due and idle:
            caller = idle.pop()
            started[id(caller)] = due.pop(0)
            caller.ask()

    def answered(caller: Caller, _: float) -> None:
        request_seconds.append(time.perf_counter() - started[id(caller)])
        idle.append(caller)
        send()

    loop = asyncio.get_running_loop()
    for _ in range(CONNECTIONS):
        idle.append((await loop.create_connection(lambda: Caller(requests, answered), "127.0.0.1", port))[1])
    begin = time.perf_counter()
    for number in range(int(seconds * rate)):
        when = begin + number / rate
        while (wait := when - time.perf_counter()) > 0:
            await asyncio.sleep(min(wait, 0.0005))
        due.append(when)
        send()
    await asyncio.sleep(0.3)
    return request_seconds


def percentile(latencies: list[float], share: float) -> float:
    return sorted(latencies)[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3


def fill(where: str, problems: list[Problem], configs: list[dict[str, Any]]) -> None:
    with Store(where) as store:
        run = store.begin(Machine("triton", GPU["identity"], {"name": GPU["identity"]}), 0, {})
        for one_problem in problems:
            timings = [(Config(c), 1e5 + i) for i, c in enumerate(configs)]
            store.add_batch(run, Kernel("asked", one_problem), 0, 1e5, timings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--store")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    few, many = tiles(20), tiles(500)
    problems = [problem(32 * (i + 1)) for i in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        where = options.store or str(Path(folder) / "s.sqlite")
        fill(where, problems, few)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1]})  # inherited by the service
        with ServedStore(where) as served:
            os.sched_setaffinity(0, set(cores[:-1]) or {cores[-1]})
            service = asyncio.run(measure_all(served.port, problems, few, many, options.seconds))
        stores = [taken_in("a file", str(Path(folder) / "w.sqlite"), few, options.seconds)]
        if why_no_postgres() is None:
            with running_cluster() as cluster:
                stores.append(taken_in("PostgreSQL", cluster.url, few, options.seconds))
    for line in (*service, *stores):
        print(json.dumps(line), flush=True)
    if options.out is not None:
        facts = {"date": today(), "machine": machine_class(), "service": service, "stores": stores}
        write_atomic(options.out, json.dumps(facts, indent=1) + "\n")


def taken_in(what: str, where: str, configs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Batches and timings a second that one process writes."""
    timings = [(Config(c), 1e5 + i) for i, c in enumerate(configs)]
    with Store(where) as store:
        run = store.begin(Machine("triton", GPU["identity"], {"name": GPU["identity"]}), 0, {})
        store.add_batch(run, Kernel("asked", problem(8)), 0, 1e5, timings)
        until, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            store.add_batch(run, Kernel("asked", problem(8 + count % 512)), 0, 1e5, timings)
            count += 1
    return {"what": what, "batches_per_s": round(count / seconds), "timings_per_s": round(20 * count / seconds)}


async def measure_all(port: int, problems: list[Problem], few: Any, many: Any, seconds: float) -> list[dict[str, Any]]:
    bodies = [request({"device": GPU, "problem": dict(p), "configs": few}) for p in problems]
    together = [request({"device": GPU, "problems": [dict(p) for p in problems[:64]], "configs": few})]
    fresh = (
        request({"device": GPU, "problem": dict(problem(33 + n % 4096, 640 + n // 4096)), "configs": many})
        for n in itertools.count()
    )
    ready = iter([next(fresh) for _ in range(int(seconds * 2500))])
    await as_fast_as_it_goes(port, itertools.cycle(bodies), 1.0)
    one = await as_fast_as_it_goes(port, itertools.cycle(bodies), seconds)
    some = await as_fast_as_it_goes(port, itertools.cycle(together), seconds)
    new = await as_fast_as_it_goes(port, ready, seconds)
    steady = await at_a_rate(port, itertools.cycle(bodies), seconds, 1000.0)
    return [
        row("known, one a request", one, seconds),
        row("known, 64 a request", some, seconds, 64),
        row("not known, 500 configurations", new, seconds),
        row("known, at 1,000 a second", steady, seconds),
    ]


def row(what: str, latencies: list[float], seconds: float, each: int = 1) -> dict[str, Any]:
    figures = {"p50_ms": round(percentile(latencies, 0.5), 2), "p99_ms": round(percentile(latencies, 0.99), 2)}
    return {"what": what, "choices_per_s": round(each * len(latencies) / seconds), **figures}


if __name__ == "__main__":
    main()
