"""Clients of a service: the tuner and autotune take its choices, tell it what they measured, and do without it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install tilewise-fleet")

from tests.fleet.served import ServedStore
from tests.waiting import PATIENCE, until
from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.gpu.autotune import Session
from tilewise.store import service as client_module
from tilewise.store.store import Machine, Store
from tilewise.tune import Tuner
from tilewise_fleet.service.tokens import create_token

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")
PROBLEM = {"family": "matmul", "m": 96, "n": 192, "k": 160, "threads": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("service") / "s.sqlite")


@pytest.fixture(scope="module")
def served(place: str) -> Iterator[ServedStore]:
    with ServedStore(place) as server:
        yield server


@pytest.fixture
def token(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(place) as store:
        monkeypatch.setenv("TILEWISE_TOKEN", create_token(store))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy: what is tested is what is said, not how soon."""
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 20.0)


@needs_native
def test_what_one_tuner_measures_the_next_takes_over(
    served: ServedStore, token: None, patient: None, tmp_path: Path
) -> None:
    first = Tuner(cache=tmp_path / "a", service=served.url, budget=3)
    first_choice = first.tune(PROBLEM)
    assert first_choice.source == "measured"
    assert first.service is not None
    first.service.flush(20.0)
    second = Tuner(cache=tmp_path / "b", service=served.url)
    second_choice = second.tune(PROBLEM)
    assert second_choice.source == "service" and second_choice.measurements >= 3
    assert second.choose(PROBLEM).source == "service"
    assert second.tune(PROBLEM, fresh=True, budget=2).source == "measured", "fresh measures here"


@needs_native
def test_what_nobody_measured_is_chosen_by_the_services_model(
    served: ServedStore, patient: None, tmp_path: Path
) -> None:
    tuner = Tuner(cache=tmp_path, service=served.url)
    choice = tuner.choose({"family": "matmul", "m": 512, "n": 512, "k": 384, "threads": 1})
    assert choice.config in tuner.device.candidates(choice.problem)


def _silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _rude_server() -> Iterator[str]:
    """Answers everything with what is no choice."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    body = b'{"choices": [{"config": {"evil": 1}, "source": "measured", "measurements": 1}]}'
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@needs_native
@pytest.mark.parametrize("server", [_silent_server, _rude_server, _nobody])
def test_without_an_answer_the_choice_is_made_here_and_that_is_said_once(server: Any, tmp_path: Path) -> None:
    messages: list[str] = []
    for url in server():
        alone = Tuner(cache=tmp_path).choose(PROBLEM)
        tuner = Tuner(cache=tmp_path, service=url, say=messages.append)
        for m in (96, 96, 64):
            tuner.choose({**PROBLEM, "m": m})
        choice = tuner.choose(PROBLEM)
        assert (choice.config, choice.source) == (alone.config, alone.source)
        tuned = Tuner(cache=tmp_path / "tuned", service=url, say=lambda _: None).tune(PROBLEM, budget=2)
        assert tuned.source == "measured"
    assert sum("is not used" in line for line in messages) == 1


def test_a_slow_service_is_waited_for_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.store.problem import Config, Problem

    timeouts: list[float | None] = []
    from concurrent.futures import Future

    plain = Future.result

    def result(self: Any, timeout: float | None = None) -> Any:
        timeouts.append(timeout)
        return plain(self, timeout)

    monkeypatch.setattr(Future, "result", result)
    for url in _silent_server():
        client = client_module.ServiceClient(url, Machine("cpu", "x", {}))
        assert client.choose(Problem.of("matmul", m=1), [Config.of(a=1)]) is None
    assert timeouts == [0.05]


LIES = [
    b'{"choices": [{"config": {"a": 1}, "source": "\\u001b[31m", "sure": null, "measurements": 1}]}',
    b'{"choices": [{"config": {"a": 1}, "source": "measured", "sure": 7, "measurements": 1}]}',
    b'{"choices": [{"config": {"a": 1}, "source": "measured", "sure": NaN, "measurements": 1}]}',
    b'{"choices": [{"config": {"a": 1}, "source": "measured", "sure": null, "measurements": -1}]}',
    b'{"choices": [{"config": {"a": 1}, "source": "measured", "sure": null, "measurements": 1, "runtime_ns": -1}]}',
    b'{"choices": [{"config": [], "source": "measured"}]}',
    b'{"choices": []}',
    b"[]",
    b"[" * 100_000,
    b"",
]


@pytest.mark.parametrize("body", LIES)
def test_an_answer_that_is_none_is_no_answer(body: bytes, monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    from tilewise.store.problem import Config, Problem

    messages: list[str] = []
    client = client_module.ServiceClient("http://someone:secret@127.0.0.1:1", Machine("cpu", "x", {}), messages.append)

    class Answered:
        status, reason = 200, "OK"

        def read(self, most: int) -> bytes:
            return body

    class Connected:
        def request(self, *_: Any) -> None: ...
        def close(self) -> None: ...
        def getresponse(self) -> Answered:
            return Answered()

    client._connection = Connected()  # type: ignore[assignment]
    monkeypatch.setattr(client, "_disconnect", lambda: None)
    assert client.choose(Problem.of("matmul", m=1), [Config.of(a=1)]) is None
    (line,) = messages
    assert "is not used" in line and "secret" not in line and line.isprintable()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "db:80", "http://x:99999"])
def test_an_address_that_is_none_is_a_sentence(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="service is like"):
        client_module.ServiceClient(url, Machine("cpu", "x", {}))


class _TritonConfig:
    def __init__(self, block: int) -> None:
        self.kwargs, self.num_warps, self.num_stages = {"BLOCK": block}, 4, 2


def test_autotune_takes_over_what_was_measured_of_the_same_kernel_elsewhere(
    served: ServedStore, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    place = str(tmp_path_factory.mktemp("gpu") / "g.sqlite")
    with Store(place) as store:
        monkeypatch.setenv("TILEWISE_TOKEN", create_token(store))
    monkeypatch.setattr("tilewise.gpu.autotune.this_gpu", lambda: (Machine("triton", "Test GPU", {}), "3", None))
    configs = [_TritonConfig(2**i) for i in range(4, 8)]
    launched: list[int] = []

    def measure(config: _TritonConfig) -> float:
        launched.append(config.kwargs["BLOCK"])
        return 1000.0 + abs(config.kwargs["BLOCK"] - 32)

    with ServedStore(place) as own:
        first = Session("kernel", "abc", 5, tmp_path / "a", lambda line: None, own.url)
        assert first.choose(configs, {"N": 4096}, [], measure).kwargs == {"BLOCK": 32}
        service = first._state[2]
        assert service is not None
        service.flush(PATIENCE)
        launched.clear()
        folders = (tmp_path / f"b{number}" for number in itertools.count())

        def chosen_without_measuring() -> Any:
            launched.clear()
            second = Session("kernel", "abc", 5, next(folders), lambda line: None, own.url)
            choice = second.choose(configs, {"N": 4096}, [], measure)
            return None if launched else choice

        assert until(chosen_without_measuring, "a choice from the service").kwargs == {"BLOCK": 32}


class TestCompiler:
    """`tilewise.inductor` asks for products that others measured, and tells what it measured itself."""

    def advisor(self, folder: Path, url: str, say: Any = None) -> Any:
        pytest.importorskip("torch")
        choices = pytest.importorskip("tilewise.gpu.inductor.choices")
        from tilewise.gpu.inductor.decision_log import DecisionLog
        from tilewise.gpu.products.runtime_model import shipped_runtime_model

        client = client_module.ServiceClient(url, choices.current_gpu(), say or (lambda line: None))
        return choices.Advisor(shipped_runtime_model(), 3, DecisionLog("m", folder), ("fake",), client)

    def test_what_one_compiler_measures_the_next_does_not(
        self, tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.gpu.inductor.test_patch import KernelInputs, template_list
        from tilewise.gpu.inductor.decision_log import report

        place = str(tmp_path / "c.sqlite")
        with Store(place) as store:
            monkeypatch.setenv("TILEWISE_TOKEN", create_token(store))
        with ServedStore(place) as own:
            first = self.advisor(tmp_path / "a", own.url)
            selection = first.select(template_list(), KernelInputs(), "mm")
            assert len(selection) > 1
            timings = {choice: 1.0 if choice is selection[-1] else 2.0 for choice in selection}
            first.on_feedback(timings, "mm", KernelInputs().nodes())
            first.service.flush(20.0)
            again = self.advisor(tmp_path / "b", own.url).select(template_list(), KernelInputs(), "mm")
        assert [choice.parameters for choice in again] == [selection[-1].parameters]
        assert [row["why"] for row in report(tmp_path / "b")["rows"]] == ["measured elsewhere"]

    @pytest.mark.parametrize("server", [_silent_server, _rude_server, _nobody])
    def test_without_an_answer_it_keeps_what_it_would_have_kept_and_says_so_once(
        self, server: Any, tmp_path: Path
    ) -> None:
        from tests.gpu.inductor.test_patch import KernelInputs, template_list

        messages: list[str] = []
        for url in server():
            advisor = self.advisor(tmp_path, url, messages.append)
            selections = [advisor.select(template_list(), KernelInputs(), "mm") for _ in range(3)]
            advisor.service = None
            alone = advisor.select(template_list(), KernelInputs(), "mm")
            assert all([c.parameters for c in selection] == [c.parameters for c in alone] for selection in selections)
        # A tile that this compiler does not list is passed over: another version may have it.
        assert sum("is not used" in line for line in messages) == (server is not _rude_server) and not advisor.notes

    def test_an_address_that_is_none_is_refused_and_leaves_pytorch_as_it_was(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        import tilewise.inductor

        with pytest.raises(ConfigurationError, match="service is like"):
            tilewise.inductor.enable(records=tmp_path, devices=("fake",), service="ftp://x")
        import torch._inductor.config as settings

        assert settings.inductor_choices_class is None
