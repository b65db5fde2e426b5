"""Asking a service (`tilewise serve`) for choices, and telling it what was measured here.

A question is asked in a thread of its own and waited for 50 ms; a service that is away, slow or wrong is said once and
left alone for half a minute, while the choice is made here as without one. Measurements are sent behind the caller's
back; what does not arrive is in this machine's own store, for `tilewise store merge`.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Machine

PATIENCE_SECONDS = 0.05
_LEFT_ALONE_SECONDS = 30.0
_SENDING_SECONDS = 5.0
_MOST_ANSWER, _MOST_UNSENT = 4 << 20, 256
_LONGEST_NS = 3.6e12
_FEATURES = "features"
_SOURCES = ("measured", "model", "default")


class Answer(NamedTuple):
    """A service's choice; `source` is what it has it from: measured, model or default."""

    config: Config
    source: str
    runtime_ns: float | None
    measurements: int
    reason: str


class ServiceClient:
    """One service as one machine talks to it."""

    def __init__(
        self, url: str, machine: Machine, say: Callable[[str], None] = lambda line: None, token: str | None = None
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # half an IPv6 address, letters for a port
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"A service's address is like http://host:8100, not {url[:80]!r}.")
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
        self.url, self._machine, self._say = shown.rstrip("/"), machine, say
        self._token = token or os.environ.get("TILEWISE_TOKEN")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/")
        # Made here: reading the authorities' certificates takes as long as an answer may.
        self._context = ssl.create_default_context() if self._secure else None
        self._jobs: queue.Queue[tuple[str, bytes, Future[Any] | None]] = queue.Queue(_MOST_UNSENT)
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._away_until, self._said = 0.0, False

    def choose(self, problem: Problem, configs: Sequence[Config] | None) -> Answer | None:
        """The service's choice among `configs`, the default first; None where it has none to give in time."""
        if time.monotonic() < self._away_until:
            return None
        question: dict[str, Any] = {"device": self._device(), "problem": dict(problem)}
        if configs is not None:
            question["configs"] = [dict(config) for config in configs]
        answered: Future[Any] = Future()
        self._send("/choose", question, answered)
        try:
            return self._answer(answered.result(PATIENCE_SECONDS), configs)
        except TooLate:
            answered.cancel()
            self._away(f"does not answer within {PATIENCE_SECONDS * 1e3:.0f} ms")
        except Exception as error:  # refused, closed, not HTTP, not JSON: the choice is made here all the same
            self._away(str(error) or type(error).__name__)
        return None

    def report(self, problem: Problem, default_ns: float, timings: Sequence[tuple[Config, float]]) -> None:
        """Tell the service what was measured; returns at once."""
        if not timings or not self._token or time.monotonic() < self._away_until:
            return
        rows = [{"config": dict(config), "runtime_ns": runtime_ns} for config, runtime_ns in timings]
        batch = {"uid": secrets.token_hex(16), "problem": dict(problem), "default_ns": default_ns, "timings": rows}
        self._send("/measurements", {"device": self._device(details=True), "batches": [batch]}, None)

    def flush(self, seconds: float = _SENDING_SECONDS) -> None:
        """Wait until what was reported has been sent."""
        until = time.monotonic() + seconds
        while self._jobs.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _device(self, details: bool = False) -> dict[str, Any]:
        known = self._machine.details
        facts: dict[str, Any] = {"kind": self._machine.kind, "identity": self._machine.identity}
        if isinstance(known.get(_FEATURES), Mapping):
            facts[_FEATURES] = dict(known[_FEATURES])
        if isinstance(known.get("shared_bytes"), int):
            facts["shared_bytes"] = known["shared_bytes"]
        if details:
            facts["details"] = {n: v for n, v in known.items() if isinstance(v, str | int) and n != "name"}
        return facts

    @staticmethod
    def _answer(content: Any, configs: Sequence[Config] | None) -> Answer:
        try:
            choice = content["choices"][0]
            config, runtime_ns, sure = Config(choice["config"]), choice.get("runtime_ns"), choice.get("sure")
            source, measurements = choice["source"], int(choice["measurements"])
        except (LookupError, TypeError, AttributeError):
            raise ValueError("its answer is none") from None
        if source not in _SOURCES or not (sure is None or 0 <= float(sure) <= 1) or measurements < 0:
            raise ValueError("its answer is none")
        if configs is not None and config not in configs:
            raise ValueError("it chose a configuration that it was not asked about")
        if runtime_ns is not None and not 0 < float(runtime_ns) < _LONGEST_NS:
            raise ValueError("it gave a runtime that is none")
        reason = f"the service's: {source}" + ("" if sure is None else f", {sure:.0%} sure")
        return Answer(config, source, runtime_ns, measurements, reason)

    def _away(self, why: str) -> None:
        self._away_until = time.monotonic() + _LEFT_ALONE_SECONDS
        if not self._said:
            self._said = True
            said = "".join(letter for letter in why if letter.isprintable())
            self._say(f"the service at {self.url} is left alone ({said}); choosing on this machine")

    # The thread that talks

    def _send(self, path: str, content: Mapping[str, Any], answered: Future[Any] | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._talk, name="tilewise-service", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((path, json.dumps(content).encode(), answered))
        except queue.Full:
            if answered is not None:
                answered.set_exception(OSError("too much is waiting to be sent"))

    def _talk(self) -> None:
        while True:
            path, body, answered = self._jobs.get()
            try:
                if answered is None or answered.set_running_or_notify_cancel():
                    result = self._ask(path, body)
                    if answered is not None:
                        answered.set_result(result)
            except Exception as error:
                self._hang_up()
                if answered is not None:
                    answered.set_exception(error)
            finally:
                self._jobs.task_done()

    def _ask(self, path: str, body: bytes) -> Any:
        for fresh in (self._connection is None, True):
            try:
                return self._once(path, body)
            except (http.client.HTTPException, OSError):  # a kept connection may have been closed meanwhile
                self._hang_up()
                if fresh:
                    raise
        return None

    def _once(self, path: str, body: bytes) -> Any:
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(self._host, self._port, timeout=_SENDING_SECONDS, context=self._context)
                if self._secure
                else http.client.HTTPConnection(self._host, self._port, timeout=_SENDING_SECONDS)
            )
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._connection.request("POST", self._path + path, body, headers)
        answer = self._connection.getresponse()
        content = _parsed(answer.read(_MOST_ANSWER))
        if answer.status >= 300:
            said = content.get("detail") if isinstance(content, dict) else None
            raise ValueError(str(said or f"{answer.status} {answer.reason}")[:200])
        if content is None:
            raise ValueError("its answer is none")
        return content

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
