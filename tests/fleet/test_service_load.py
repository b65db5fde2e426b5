"""200 clients and two kills: every acknowledged measurement is there, once. And the OpenAPI page taken at its word."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install tilewise-fleet")

from tests.fleet.served import ServedStore
from tests.store.stores import HOMES, new_database, shared_cluster
from tests.waiting import PATIENCE, until
from tilewise.store.store import Store
from tilewise_fleet.service.tokens import create_token

pytestmark = pytest.mark.slow
CLIENTS, EACH = 200, 10
GPU = {"kind": "triton", "identity": "Test GPU"}
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(params=HOMES)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "s.sqlite")
        return
    with shared_cluster() as cluster:
        yield new_database(cluster, "load")


class Sender(threading.Thread):
    """Sends its batches one after the other, each again until it is acknowledged."""

    def __init__(self, port: int, number: int, token: str, counter: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.port, self.number, self.token, self.counter = port, number, token, counter
        self.acknowledged: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        for at in range(EACH):
            uid = f"client-{self.number:04}-{at:04}"
            problem = {"family": "softmax", "rows": 1 + self.number, "cols": 1 + at, "dtype": "fp32"}
            timing = {"config": {"block": 64}, "runtime_ns": 5000.0}
            batch = {"uid": uid, "problem": problem, "default_ns": 5000.0, "timings": [timing]}
            body = json.dumps({"device": GPU, "batches": [batch]})
            while len(self.acknowledged) <= at:
                try:
                    connection.request("POST", "/measurements", body, headers)
                    answer = connection.getresponse()
                    answer.read()
                    self.counter[str(answer.status)] += 1
                    if answer.status == 201:
                        self.acknowledged.append(uid)
                    else:
                        time.sleep(0.1)
                except (OSError, http.client.HTTPException):
                    connection.close()
                    self.counter["broken"] += 1
                    time.sleep(0.1)


def test_after_two_kills_every_acknowledged_measurement_is_there_once(where: str) -> None:
    with Store(where) as store:
        token = create_token(store)
    counter, total = Counter[str](), CLIENTS * EACH
    served = ServedStore(where, "--rate", "0")
    senders = [Sender(served.port, number, token, counter) for number in range(CLIENTS)]
    started = time.perf_counter()
    try:
        for sender in senders:
            sender.start()
        for kill in (1, 2):
            enough = kill * total // 3
            until(lambda enough=enough: sum(len(sender.acknowledged) for sender in senders) >= enough, "a third")
            served.kill()
            served.start()
        for sender in senders:
            sender.join(PATIENCE)
        seconds = time.perf_counter() - started
    finally:
        assert served.stop() == 0, "it stops in order"
    acknowledged = {uid for sender in senders for uid in sender.acknowledged}
    assert len(acknowledged) == total, counter
    with Store(where) as store:
        rows = store.database.read("SELECT uid FROM batch JOIN timing ON timing.batch = batch.id")
    assert sorted(uid.split("/", 1)[1] for (uid,) in rows) == sorted(acknowledged)
    print(f"\n{total} measurements of {CLIENTS} clients in {seconds:.1f} s with two kills: {dict(counter)}")


@pytest.mark.parametrize("has_token", [True, False])
def test_no_answer_is_undocumented_and_none_is_a_5xx(tmp_path: Path, has_token: bool) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed; `make test-fleet` installs it")
    where = str(tmp_path / "s.sqlite")
    with Store(where) as store:
        token = create_token(store)
    with ServedStore(where, "--rate", "0") as served:
        options = ["-H", f"Authorization: Bearer {token}"] if has_token else []
        limits = ["--max-examples", os.environ.get("TILEWISE_FUZZ_EXAMPLES", "60"), "--seed", "1", "--workers", "1"]
        program = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
        command = [*program, "run", f"{served.url}/openapi.json", "--checks", CHECKS, *limits, *options]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-600:])
