"""`tilewise fleet serve`: choices from measurements and models, reported measurements, and error messages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install tilewise-fleet")

from fastapi.testclient import TestClient

from tests.waiting import until
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Kernel, Problem
from tilewise.store.store import Store
from tilewise.web.limits import MAX_BODY_BYTES
from tilewise_fleet.service import service
from tilewise_fleet.service.app import create_app
from tilewise_fleet.service.choices import PROGRAM
from tilewise_fleet.service.tokens import create_token, find_owner, revoke_token

GPU = {"kind": "triton", "identity": "NVIDIA H200"}
PART = "triton NVIDIA H200"


def spec(m: int = 512) -> dict[str, Any]:
    return dict(get_family("matmul").problem({"family": "matmul", "m": m, "n": 1024, "k": 512}))


def tiles(count: int = 40) -> list[dict[str, Any]]:
    problem = get_family("matmul").problem({"family": "matmul", "m": 512, "n": 1024, "k": 512})
    return [dict(config) for config in get_family("matmul").configs(problem)[:count]]


def batch(uid: str = "batch-0001", m: int = 512, best: int = 3, count: int = 40) -> dict[str, Any]:
    timings = [{"config": c, "runtime_ns": 9e4 if i == best else 1e5 + i} for i, c in enumerate(tiles(count))]
    return {"uid": uid, "problem": spec(m), "default_ns": 1e5, "timings": timings}


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path / "s.sqlite")


@pytest.fixture
def token(where: str) -> str:
    with Store(where) as store:
        return create_token(store, PART)


@pytest.fixture
def client(where: str, token: str) -> Iterator[TestClient]:
    with TestClient(create_app(where, rate=0), headers={"Authorization": f"Bearer {token}"}) as test_client:
        yield test_client


def ask(client: TestClient, **content: Any) -> dict[str, Any]:
    answer = client.post("/choose", json={"device": GPU, **content})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_what_nobody_measured_is_the_models_choice_with_how_sure_it_is(client: TestClient) -> None:
    choice = ask(client, problem=spec(), configs=tiles())
    assert choice["source"] in ("model", "default")
    assert choice["config"] in tiles()
    assert 0 <= choice["sure"] <= 1
    assert ask(client, problem=spec())["config"], "a family's own configurations, where none are given"


def test_a_measurement_is_in_the_store_when_it_is_acknowledged_and_changes_the_answer(
    client: TestClient, where: str
) -> None:
    ask(client, problem=spec(), configs=tiles())
    sent = client.post("/measurements", json={"device": GPU, "batches": [batch()]})
    assert (sent.status_code, sent.json()) == (201, {"batches": 1, "timings": 40})
    with Store(where) as store:
        assert store.counts()["timings"] == 40
    until(lambda: ask(client, problem=spec(), configs=tiles())["source"] == "measured", "an answer from measurements")
    choice = ask(client, problem=spec(), configs=tiles())
    assert choice["config"] == tiles()[3]
    assert (choice["sure"], choice["measurements"], choice["runtime_ns"]) == (1.0, 40, 9e4)


def test_sent_twice_it_is_there_once(client: TestClient, where: str) -> None:
    for _ in range(2):
        assert client.post("/measurements", json={"device": GPU, "batches": [batch()]}).status_code == 201
    with Store(where) as store:
        assert store.counts()["timings"] == 40


def test_several_problems_are_answered_in_their_order(client: TestClient) -> None:
    client.post("/measurements", json={"device": GPU, "batches": [batch(m=96, best=5)]})
    body = {"device": GPU, "problems": [spec(64), spec(96)], "configs": tiles()}
    first, second = client.post("/choose", json=body).json()["choices"]
    assert first["source"] != "measured" and second["config"] == tiles()[5]


def test_problems_that_are_unsure_or_popular_are_queued_for_the_fleet(client: TestClient, where: str) -> None:
    client.post("/measurements", json={"device": GPU, "batches": [batch(m=32)]})  # the store knows the machine
    for _ in range(25):
        ask(client, problem=spec(), configs=tiles())

    def queued() -> list[Any]:
        client.get("/health")
        with Store(where) as store:
            return store.queue()

    ((kernel, why),) = until(queued, "a queued problem")
    assert dict(kernel.problem) == spec() and why in ("unsure", "popular")


def test_a_request_without_a_token_changes_nothing_that_the_fleet_measures(client: TestClient, where: str) -> None:
    client.post("/measurements", json={"device": GPU, "batches": [batch(m=32)]})
    with Store(where) as store:
        store.plan([Kernel(PROGRAM, Problem(spec(48)))])
    stranger = {"Authorization": "Bearer tw_unknown"}
    for problem in [spec(m) for m in range(64, 80)] + [spec(64)] * 25:
        body = {"device": GPU, "problem": problem, "configs": tiles()}
        assert client.post("/choose", json=body, headers=stranger).status_code == 200
    for _ in range(25):  # with a token: written after what was gathered before
        ask(client, problem=spec(256), configs=tiles())

    def queue() -> list[int]:
        client.get("/health")
        with Store(where) as store:
            return [kernel.problem["m"] for kernel, _ in store.queue()]

    assert until(lambda: len(queue()) > 1 and queue(), "a queued problem") == [48, 256], "below the plan"


def test_a_token_queues_no_more_than_its_quota(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_QUEUED_PER_HOUR", 3.0)
    with Store(where) as store:
        token = create_token(store, PART)
    with TestClient(create_app(where, rate=0), headers={"Authorization": f"Bearer {token}"}) as client:
        client.post("/measurements", json={"device": GPU, "batches": [batch(m=32)]})
        for _ in range(25):
            client.post(
                "/choose", json={"device": GPU, "problems": [spec(64 + m) for m in range(8)], "configs": tiles()}
            )
    with Store(where) as store:
        assert store.queue_length() == 3


def test_a_uid_with_other_measurements_is_a_conflict(client: TestClient, where: str) -> None:
    assert client.post("/measurements", json={"device": GPU, "batches": [batch()]}).status_code == 201
    for other in (batch(best=4), batch(count=39), batch(m=96), {**batch(), "default_ns": 2e5}):
        answer = client.post("/measurements", json={"device": GPU, "batches": [other]})
        assert answer.status_code == 409 and "choose a new uid" in answer.json()["detail"], answer.text
    with Store(where) as store:
        assert store.counts()["timings"] == 40


def test_choices_have_a_rate_limit(where: str) -> None:
    with Store(where):
        pass
    with TestClient(create_app(where, rate=0.2)) as client:
        body = {"device": GPU, "problem": spec(), "configs": tiles()}
        assert {client.post("/choose", json=body).status_code for _ in range(14)} == {200, 429}


INVALID: list[tuple[str, Any, int, str]] = [
    ("/choose", {"device": GPU}, 400, "give a problem"),
    ("/choose", {"device": {"kind": "tpu", "identity": "x"}, "problem": {"family": "x"}}, 400, "device.kind"),
    ("/choose", {"device": GPU, "problem": {"family": "x'; DROP TABLE timing; --"}}, 400, "short words"),
    ("/choose", {"device": GPU, "problem": {"family": "matmul", "m": 1.5}}, 400, "whole numbers"),
    ("/choose", {"device": GPU, "problem": {"family": "no_such_family"}}, 400, "no Triton kernel family"),
    ("/choose", {"device": GPU, "problem": spec(), "configs": []}, 400, "the default first"),
    ("/choose", {"device": GPU, "problem": spec(), "configs": [{"a; b": 1}]}, 400, "whole numbers"),
    ("/choose", {"device": GPU, "problem": spec(), "more": 1}, 400, "not 'more'"),
    ("/choose", b"[" * 100_000, 400, "JSON object"),
    ("/choose", b" " * (MAX_BODY_BYTES + 1), 413, "at most"),
    ("/measurements", {"device": {**GPU, "identity": "Other GPU"}, "batches": [batch()]}, 403, "this token is for"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "default_ns": 1e-3}]}, 400, "outside the range"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "default_ns": 1e300}]}, 400, "outside the range"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "default_ns": 20}]}, 400, "faster than any device"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "default_ns": 3e11}]}, 400, "times the default's"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "uid": "a' OR 1"}]}, 400, "uid is the unique name"),
    ("/measurements", {"device": GPU, "batches": [{**batch(), "timings": []}]}, 400, "a list of one to"),
]


@pytest.mark.parametrize(("path", "content", "status", "sentence"), INVALID)
def test_nonsense_is_refused_with_a_sentence(
    client: TestClient, where: str, path: str, content: Any, status: int, sentence: str
) -> None:
    raw = isinstance(content, bytes)
    headers = {"Content-Type": "application/json"}
    answer = client.post(path, content=content, headers=headers) if raw else client.post(path, json=content)
    assert answer.status_code == status
    assert sentence in answer.json()["detail"] and "\n" not in answer.json()["detail"]
    with Store(where) as store:
        assert store.database.read("SELECT count(*) FROM timing") == [(0,)]


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer tw_no_such", "Basic abc", "Bearer " + "x" * 1000])
def test_measurements_need_a_token_that_the_store_knows(client: TestClient, header: str) -> None:
    answer = client.post("/measurements", json={"device": GPU, "batches": [batch()]}, headers={"Authorization": header})
    assert answer.status_code == 401 and "token" in answer.json()["detail"]


def test_a_revoked_token_opens_nothing(where: str, token: str) -> None:
    with Store(where) as store:
        revoke_token(store, token)
    with TestClient(create_app(where)) as client:
        headers = {"Authorization": f"Bearer {token}"}
        assert (
            client.post("/measurements", json={"device": GPU, "batches": [batch()]}, headers=headers).status_code == 401
        )


def test_one_token_sends_so_much_in_a_second(where: str, token: str) -> None:
    with TestClient(create_app(where, rate=1.0), headers={"Authorization": f"Bearer {token}"}) as client:
        sent = [
            client.post("/measurements", json={"device": GPU, "batches": [batch(f"batch-{i:04}")]}) for i in range(8)
        ]
    assert {answer.status_code for answer in sent} == {201, 429}
    assert "try again" in sent[-1].json()["detail"]


def test_a_file_takes_no_other_machines_measurements(where: str) -> None:
    with Store(where) as store:
        anybody = create_token(store)
    with TestClient(create_app(where), headers={"Authorization": f"Bearer {anybody}"}) as client:
        assert client.post("/measurements", json={"device": GPU, "batches": [batch()]}).status_code == 201
        other = {**GPU, "identity": "Other GPU"}
        answer = client.post("/measurements", json={"device": other, "batches": [batch("batch-0002")]})
    assert answer.status_code == 400 and "must not be mixed" in answer.json()["detail"]


def test_health_metrics_and_the_openapi_page(client: TestClient) -> None:
    ask(client, problem=spec(), configs=tiles())
    assert client.get("/health").json()["status"] == "ok"
    client.post("/choose", json={})
    metrics = client.get("/metrics").text
    assert "tilewise_choices_total" in metrics and 'tilewise_refused_total{code="schema"} 1.0' in metrics
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {"/choose", "/measurements", "/health"}


def test_the_page_of_the_service_loads_nothing_from_elsewhere_and_its_examples_work(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert re.findall(r'(?:src|href)=["\'](?!/|data:)', page.text) == []
    assert client.get("/docs.css").headers["content-type"].startswith("text/css")
    bodies = [json.loads(body) for body in re.findall(r"-d '(.*?)'</pre>", html.unescape(page.text), re.S)]
    choose, measurements = bodies
    assert client.post("/choose", json=choose).status_code == 200
    assert client.post("/measurements", json=measurements).status_code == 201


def test_a_token_with_underscores_in_its_secret_is_revoked_by_itself(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "a_b__c_" * 6)
    with Store(where) as store:
        token = create_token(store, PART)
        assert token.count("_") > 2 and find_owner(store, token) is not None
        revoke_token(store, token)
        assert find_owner(store, token) is None


def test_without_tokens_only_this_machines_own_names_are_answered(where: str) -> None:
    """A web page whose name resolves to this machine would count as the same origin to a browser (DNS rebinding)."""
    content = {"device": GPU, "batches": [batch()]}
    with TestClient(create_app(where, rate=0, tokens=False), base_url="http://rebound.example:8100") as page:
        assert page.post("/measurements", json=content).status_code == 400
        assert page.post("/choose", json={"device": GPU, "problem": spec(), "configs": tiles()}).status_code == 400
    for name in ("127.0.0.1:8100", "localhost:8100", "[::1]:8100"):
        with TestClient(create_app(where, rate=0, tokens=False), base_url=f"http://{name}") as page:
            assert page.post("/measurements", json=content).status_code == 201
