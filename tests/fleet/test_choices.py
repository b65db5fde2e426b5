"""Choices by themselves: lists of configurations, the cache of problems, and what is worth measuring."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tilewise.errors import Rejected
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config, Machine, Problem
from tilewise_fleet.service import choices
from tilewise_fleet.service.bodies import KnownList
from tilewise_fleet.service.choices import (
    LOW_CONFIDENCE,
    POPULAR_REQUESTS,
    CachedProblem,
    ChoiceCache,
    ChoiceQuery,
    EncodedChoice,
    MeasuredRuntimes,
    measurable_problems,
)

GPU = Machine("triton", "NVIDIA H200", {"name": "NVIDIA H200"})
CPU = Machine("cpu", "a CPU", {"name": "a CPU"})
UNKNOWN = Problem({"family": "nobody's", "m": 64})  # no cost model scores it


def product(m: int = 512) -> Problem:
    return get_family("matmul").problem({"family": "matmul", "m": m, "n": 1024, "k": 512})


def tiles(count: int) -> tuple[Config, ...]:
    return tuple(get_family("matmul").configs(product())[:count])


def query(configs: tuple[Config, ...], problem: Problem = UNKNOWN, number: int = 1) -> ChoiceQuery:
    return ChoiceQuery(GPU, problem, configs, number, {})


def decided(configs: tuple[Config, ...], runtimes: MeasuredRuntimes | None, problem: Problem = UNKNOWN) -> Any:
    cache, request = ChoiceCache(), query(configs, problem)
    return json.loads(cache.choose(request, cache.update(request, runtimes)).text)


def test_equal_lists_have_one_number_however_they_came() -> None:
    cache = ChoiceCache()
    plain: list[Any] = [{"a": 1}, {"a": 2}]
    number, configs = cache.configs(plain, GPU, UNKNOWN, {})
    token_list = KnownList(plain)
    assert cache.configs(token_list, GPU, UNKNOWN, {}) == (number, configs) == token_list.entry
    assert cache.configs(token_list, GPU, UNKNOWN, {}) == (number, configs)
    assert cache.configs([{"a": 2}, {"a": 1}], GPU, UNKNOWN, {})[0] == number + 1
    for nonsense in ([object()], "x", {}):
        with pytest.raises(Rejected, match="configurations"):
            cache.configs(nonsense, GPU, UNKNOWN, {})


def test_only_the_latest_lists_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_MAX_LISTS", 2)
    cache = ChoiceCache()
    numbers = [cache.configs([{"a": at}], GPU, UNKNOWN, {})[0] for at in (1, 2, 2, 3, 3, 1)]
    assert numbers == [1, 2, 2, 3, 3, 4]


def test_without_a_list_a_familys_own_configurations_that_fit_are_meant() -> None:
    cache = ChoiceCache()
    assert cache.configs(None, CPU, product(), {}) == (0, ())
    number, every = cache.configs(None, GPU, product(), {})
    again, fitting = cache.configs(None, GPU, product(), {"shared_bytes": 64 << 10})
    assert number != again and 0 < len(fitting) < len(every) and set(fitting) < set(every)
    assert cache.configs(None, GPU, product(), {})[0] == number
    for wrong, sentence in ((1, "no configuration of matmul fits"), (1.5, "must be an integer"), (True, "integer")):
        with pytest.raises(Rejected, match=sentence):
            cache.configs(None, GPU, product(), {"shared_bytes": wrong})


def test_the_fastest_measured_candidate_is_chosen() -> None:
    a, b, c = tiles(3)
    runtimes = MeasuredRuntimes({a: 3.0, b: 2.0, c: 1.0}, 3.0, True)
    expected = {"source": "measured", "sure": 1.0, "default_ns": 3.0}
    assert decided((a, b), runtimes) == expected | {"config": dict(b), "measurements": 2, "runtime_ns": 2.0}
    assert decided((), runtimes) == expected | {"config": dict(c), "measurements": 3, "runtime_ns": 1.0}
    all_but_finished = MeasuredRuntimes({a: 3.0, b: 2.0}, 3.0, False)
    assert decided((a, b), all_but_finished)["sure"] == 1.0, "every candidate was measured"
    assert decided((a, b, c), all_but_finished)["sure"] is None, "no model says how likely a better one is"


def test_without_a_measurement_or_a_model_the_first_is_chosen() -> None:
    a, b, c = tiles(3)
    default = {"source": "default", "sure": None, "measurements": 0, "runtime_ns": None, "default_ns": None}
    assert decided((b, a), None) == default | {"config": dict(b)}
    assert decided((a, b), MeasuredRuntimes({c: 1.0}, 1.0, True)) == default | {"config": dict(a)}
    assert decided((), None) == default | {"config": {}}
    one, two = decided(tiles(1), None, product()), decided(tiles(40), None, product())
    assert one["sure"] is None and one["source"] == "default"
    assert 0 < two["sure"] < 1 and two["source"] in ("model", "default")
    assert decided(tiles(2), None, product())["sure"] is not None, "two candidates are ranked"


def test_an_incomplete_measurement_is_as_sure_as_the_models_first_five() -> None:
    configs = tiles(40)
    four, five = (
        decided(configs, MeasuredRuntimes({c: 1.0 + at for at, c in enumerate(configs[:count])}, 1.0, False), product())
        for count in (4, 5)
    )
    assert (four["measurements"], five["measurements"]) == (4, 5)
    assert decided(configs, None, product())["sure"] == four["sure"] < five["sure"] < 1


def test_a_cached_problem_is_renewed_by_what_the_store_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(choices.time, "monotonic", lambda: now[0])
    cache, request = ChoiceCache(max_problems=2), query(tiles(2))
    assert cache.lookup(request) is None
    entry = cache.update(request, None)
    assert entry.expires == 100.0 + choices.REFRESH_SECONDS and cache.lookup(request) is entry
    entry.queued = True
    choice, now[0] = cache.choose(request, entry), 103.0
    assert cache.update(request, None) is entry and entry.queued and entry.choices == {1: choice}
    assert entry.expires == 103.0 + choices.REFRESH_SECONDS
    cache.invalidate(GPU, UNKNOWN)
    assert entry.expires == -1.0
    cache.update(request, MeasuredRuntimes({tiles(2)[1]: 1.0}, 1.0, True))
    assert not entry.queued and entry.choices == {}
    for m in (8, 16):
        cache.update(query(tiles(2), Problem({"family": "f", "m": m})), None)
    assert len(cache.problems) == 2 and cache.lookup(request) is None
    cache.invalidate(GPU, UNKNOWN)  # of a problem that is gone


def test_a_problem_keeps_the_choices_of_four_lists() -> None:
    cache = ChoiceCache()
    entry = cache.update(query(tiles(2)), None)
    for number in range(1, 5):
        cache.choose(query(tiles(2), number=number), entry)
    assert list(entry.choices) == [1, 2, 3, 4]
    cache.choose(query(tiles(2), number=5), entry)
    assert list(entry.choices) == [5]


def test_unsure_and_popular_problems_are_worth_measuring() -> None:
    cache, request = ChoiceCache(), query(tiles(2))
    sure, unsure = (EncodedChoice(b"", "model", value) for value in (LOW_CONFIDENCE, LOW_CONFIDENCE - 0.01))
    fresh, popular = (CachedProblem(None, 0.0, requests=n) for n in (POPULAR_REQUESTS - 1, POPULAR_REQUESTS))
    assert cache.reason_to_measure(request, fresh, unsure) == "unsure"
    assert cache.reason_to_measure(request, fresh, EncodedChoice(b"", "default", None)) == "unsure"
    assert cache.reason_to_measure(request, fresh, sure) is None
    assert cache.reason_to_measure(request, popular, sure) == "popular"
    assert cache.reason_to_measure(query(tiles(1)), popular, unsure) is None
    popular.queued = True
    assert cache.reason_to_measure(request, popular, unsure) is None
    entry = CachedProblem(MeasuredRuntimes({}, None, False), 0.0, requests=99)
    assert cache.reason_to_measure(request, entry, unsure) is None


def test_the_fleet_measures_whole_problems_of_its_own_families() -> None:
    incomplete = Problem({"family": "matmul", "m": 64})
    assert measurable_problems("triton", [product(), UNKNOWN, incomplete, product(64)]) == [product(), product(64)]
