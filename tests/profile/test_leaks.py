"""Promises of leak detection: a leak of 1 KB a call is found and traced to its caller; what is clean stays quiet."""

from __future__ import annotations

import collections
import contextlib
import copy
import csv
import dataclasses
import enum
import functools
import gc
import hashlib
import io
import itertools
import json
import queue
import random
import re
import string
import struct
import tempfile
import threading
import traceback
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pytest

from tilewise import Tensor, models, no_grad
from tilewise.profile.leaks import IMMORTAL, find_leak, steady_growth

_store: list[object] = []


class _Node:
    pass


def _leak_array():
    _store.append(np.zeros(125))


def _leak_bytes():
    _store.append(bytes(1000))


def _leak_cycle_with_global():
    node = _Node()
    node.data, node.me = bytearray(1000), node
    _store.append(node)


def _leak_every_fourth():
    _store.append(None)
    if len(_store) % 4 == 0:
        _store.append(bytes(4000))


_table: dict[int, bytes] = {}
_numbers = itertools.count()
_text = [io.StringIO()]
_grown = {"array": np.zeros(0, np.uint8)}
_weights = Tensor(np.ones(8, np.float32), requires_grad=True)


def _leak_into_dictionary():
    _table[next(_numbers)] = bytes(1000)


def _leak_closure():
    data = bytearray(1000)
    _store.append(lambda: data)


def _leak_many_small_arrays():
    _store.append([np.zeros(8, np.float32) for _ in range(6)])


def _leak_by_growing_an_array():
    _grown["array"] = np.concatenate([_grown["array"], np.zeros(1000, np.uint8)])


def _leak_text():
    _text[0].write(str(next(_numbers)).zfill(1000))


def _leak_graph():
    _store.append(_weights * 2.0)  # the history of losses that keeps every step's graph


@functools.cache
def _unbounded(n):
    return bytes(1000 + 0 * n)


def _leak_unbounded_cache():
    _unbounded(next(_numbers))


def _leak_default_argument(blocks=[]):  # noqa: B006
    blocks.append(bytes(1000))


def _leak_exception():
    try:
        raise ValueError(bytes(900))
    except ValueError as error:
        _store.append(error)


def _leak_in_thread():
    thread = threading.Thread(target=_leak_bytes)
    thread.start()
    thread.join()


def _leak_amid_noise():
    _store.append(bytes(random.randrange(600, 1400)))
    [bytes(random.randrange(10_000)) for _ in range(20)]


LEAKS = [value for name, value in list(globals().items()) if name.startswith("_leak_")]


@pytest.mark.parametrize("func", LEAKS)
def test_a_leak_of_a_kilobyte_a_call_is_found_and_located(func, either_way):
    _store.clear()
    _text[0] = io.StringIO()  # a long text grows by ever larger steps, with none in between
    leak = find_leak(func, seconds=300)
    _store.clear()
    assert leak.leaking
    assert 700 < leak.bytes_per_call < 1700
    assert leak.sites[0].where.startswith(__file__)


@functools.lru_cache(maxsize=64)
def _cached(n):
    return bytes(1000 + 0 * n)


_counter = iter(range(10**9))
_recent: collections.deque[object] = collections.deque(maxlen=20)
_state = {"n": 0}


def _raises_and_catches():
    try:
        raise ValueError("x" * 100)
    except ValueError as error:
        return str(error)


def _makes_cycles():
    node = _Node()
    node.me = node
    node.data = bytes(5000)


def _counts():
    _state["n"] += 1


def _threads():
    threads = [threading.Thread(target=_cached, args=(1,)) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]


@functools.lru_cache(maxsize=128)
def _cached_list(n):
    return [n] * 50


_weak: weakref.WeakKeyDictionary[object, bytes] = weakref.WeakKeyDictionary()
_ring: list[bytes] = [b""] * 50
_emptied: list[bytes] = []
_model = models.mlp(8, 2)
_batch = np.ones((4, 8), np.float32)


class _Lazy:
    @functools.cached_property
    def value(self):
        return bytes(4000)


def _fills_a_ring():
    number = next(_numbers)
    _ring[number % 50] = bytes(500 + 357 * (number % 7))  # drawn sizes would now and then grow for a while


def _empties_now_and_then():
    _emptied.append(bytes(300))
    if len(_emptied) >= 60:
        _emptied.clear()


def _weakly_keyed():
    _weak[_Node()] = bytes(1000)


def _makes_dataclass():
    return dataclasses.make_dataclass("Point", ["x", "y"])(1, 2)


def _writes_a_file():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(5000))


def _fills_and_drains():
    waiting = queue.Queue()
    [waiting.put(i) for i in range(100)]
    [waiting.get() for _ in range(100)]


def _trains():
    _model.zero_grad()
    _model(Tensor(_batch)).sum().backward()


def _infers():
    with no_grad():
        _model(Tensor(_batch))


def _formats_a_traceback():
    try:
        raise KeyError("x")
    except KeyError:
        traceback.format_exc()


def _uses_a_pool():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(str, range(10)))


def _enters_many():
    with contextlib.ExitStack() as stack:
        [stack.enter_context(contextlib.nullcontext()) for _ in range(20)]


CLEAN = {
    "nothing": lambda: None,
    "array": lambda: np.ones(10_000).sum(),
    "matmul": lambda: np.ones((50, 50)) @ np.ones((50, 50)),
    "list": lambda: [i**2 for i in range(1000)],
    "dictionary": lambda: {str(i): i for i in range(500)},
    "cycles": _makes_cycles,
    "cache with one key": lambda: _cached(0),
    "cache that fills up": lambda: _cached(next(_counter)),
    "bounded queue": lambda: _recent.append(bytes(2000)),
    "counter": _counts,
    "exception": _raises_and_catches,
    "regular expression": lambda: re.sub(r"a+", "b", "aaa" * 100),
    "json": lambda: json.loads(json.dumps({"a": list(range(100))})),
    "sorting": lambda: sorted(random.Random(0).random() for _ in range(500)),
    "text": lambda: "".join(f"{i:05d}" for i in range(500)),
    "stream": lambda: io.BytesIO(bytes(10_000)).read(),
    "generator": lambda: sum(x for x in range(1000)),
    "class": lambda: type("Made", (), {"x": 1})(),
    "random arrays": lambda: np.random.default_rng(0).random((30, 30)).std(),
    "threads": _threads,
    "random sizes": lambda: bytes(random.randrange(100, 10_000)),
    "closure": lambda: (lambda x: lambda: x)(bytes(100))(),
    "default cache that fills up": lambda: _cached_list(next(_numbers)),
    "cache of few keys": lambda: _unbounded(-1 - next(_numbers) % 40),
    "patterns until their cache is full": lambda: re.compile(f"a{next(_numbers)}+b"),
    "ring": _fills_a_ring,
    "emptied now and then": _empties_now_and_then,
    "weak keys": _weakly_keyed,
    "cached property": lambda: _Lazy().value,
    "dataclass": _makes_dataclass,
    "enumeration": lambda: enum.Enum("Colour", ["RED", "BLUE"]),
    "file": _writes_a_file,
    "queue": _fills_and_drains,
    "training step": _trains,
    "inference": _infers,
    "traceback": _formats_a_traceback,
    "thread pool": _uses_a_pool,
    "many contexts": _enters_many,
    "hash": lambda: hashlib.sha256(bytes(10_000)).hexdigest(),
    "compression": lambda: zlib.decompress(zlib.compress(bytes(20_000))),
    "table as text": lambda: list(csv.reader(io.StringIO("a,b\n1,2\n" * 50))),
    "deep copy": lambda: copy.deepcopy({"a": [1, 2, {"b": 3}] * 10}),
    "packed numbers": lambda: struct.unpack("<100d", struct.pack("<100d", *range(100))),
    "template": lambda: string.Template("$x and $y").substitute(x=1, y=2),
    "decimals": lambda: Decimal(2).sqrt(),
    "compiled source": lambda: exec("a = 1\nb = [a] * 100", {}),
    "transform": lambda: np.fft.fft(np.ones(100)),
    "singular values": lambda: np.linalg.svd(np.ones((30, 30))),
    "einsum": lambda: np.einsum("ij,jk", np.ones((9, 9)), np.ones((9, 9))),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_function_raises_no_alarm(name):
    re.purge()  # as if no other test had filled the cache of patterns
    leak = find_leak(CLEAN[name], seconds=300)
    assert not leak.leaking, str(leak)


def test_growth_that_stops_is_no_leak():
    assert steady_growth(np.minimum(np.arange(40), 20) * 1000.0) == 0.0
    assert steady_growth(np.where(np.arange(40) > 20, 50_000.0, 0.0)) == 0.0
    filled_then_doubled = np.minimum(np.arange(40), 22) * 1000.0 + np.where(np.arange(40) > 33, 8000.0, 0.0)
    assert steady_growth(filled_then_doubled) == 0.0
    assert steady_growth(np.arange(40) * 1000.0) == pytest.approx(1000.0)
    assert steady_growth(np.arange(400) // 20 * 20_000.0) == pytest.approx(1000.0, rel=0.1)
    assert steady_growth(np.arange(3) * 1000.0) == 0.0


@pytest.mark.parametrize("aside", [True, False])
def test_objects_that_somebody_set_aside_stay_so(aside):
    """A server freezes what it imported; a search must not hand all of it back to the collector."""
    gc.freeze() if aside else gc.unfreeze()
    try:
        find_leak(lambda: None)
        assert (gc.get_freeze_count() > IMMORTAL) is aside
    finally:
        gc.freeze()
