"""Client of the tuning service (`tilewise fleet serve`): requests choices and reports measurements.

A request runs in a background thread; the caller waits 50 ms for it. A service that is unreachable, slow or wrong is
reported once and not asked for half a minute; choices are then made on this machine as without a service. Measurements
are sent in the background. Those that do not arrive are in this machine's own store, for `tilewise store merge`.
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
from tilewise.store.problem import Config, Machine, Problem

ANSWER_TIMEOUT_S = 0.05  # the longest that a choice waits for the service
_RETRY_AFTER_S = 30.0  # pause after a failure
_CONNECTION_TIMEOUT_S = 5.0
_MAX_RESPONSE_BYTES, _MAX_UNSENT = 4 << 20, 256
_MAX_RUNTIME_NS = 3.6e12  # one hour
_FEATURES = "features"
_SOURCES = ("measured", "model", "default")


class ServiceAnswer(NamedTuple):
    """Choice of the service; `source` says where it comes from: measured, model or default."""

    config: Config
    source: str
    runtime_ns: float | None
    measurements: int
    reason: str


class ServiceClient:
    """Client of a tuning service for one machine; `say` receives messages for the user."""

    def __init__(
        self, url: str, machine: Machine, say: Callable[[str], None] = lambda line: None, token: str | None = None
    ) -> None:
        """Parse the address; no connection is opened yet."""
        try:
            address = urlsplit(url)
            port = address.port
        except ValueError:  # an incomplete IPv6 address, or letters as a port
            address, port = urlsplit(""), None
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigurationError(f"The address of a service is like http://host:8100, not {url[:80]!r}.")
        public_url = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()  # without a password
        self.url, self._machine, self._say = public_url.rstrip("/"), machine, say
        self._token = token or os.environ.get("TILEWISE_TOKEN")
        self._host, self._port = address.hostname, port
        self._path = address.path.rstrip("/")
        # Loading the certificates takes as long as an answer may take, so it is done in advance.
        is_secure = address.scheme == "https"
        self._context = ssl.create_default_context() if is_secure else None
        self._jobs: queue.Queue[tuple[str, bytes, Future[Any] | None]] = queue.Queue(_MAX_UNSENT)
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._paused_until, self._failure_reported = 0.0, False

    def choose(self, problem: Problem, configs: Sequence[Config] | None) -> ServiceAnswer | None:
        """Ask the service to choose among `configs`, the default first; None if it does not answer in time."""
        if time.monotonic() < self._paused_until:
            return None
        question: dict[str, Any] = {"device": self._device(), "problem": dict(problem)}
        if configs is not None:
            question["configs"] = [dict(config) for config in configs]
        response: Future[Any] = Future()
        self._send("/choose", question, response)
        try:
            return self._parse_answer(response.result(ANSWER_TIMEOUT_S), configs)
        except TooLate:
            response.cancel()
            self._pause(f"does not answer within {ANSWER_TIMEOUT_S * 1e3:.0f} ms")
        except Exception as error:  # refused, closed, not HTTP, not JSON: the choice is made on this machine
            self._pause(str(error) or type(error).__name__)
        return None

    def report(self, problem: Problem, default_ns: float, timings: Sequence[tuple[Config, float]]) -> None:
        """Send measured (configuration, ns) pairs of a problem to the service in the background."""
        if not timings or not self._token or time.monotonic() < self._paused_until:
            return
        rows = [{"config": dict(config), "runtime_ns": runtime_ns} for config, runtime_ns in timings]
        batch = {"uid": secrets.token_hex(16), "problem": dict(problem), "default_ns": default_ns, "timings": rows}
        self._send("/measurements", {"device": self._device(details=True), "batches": [batch]}, None)

    def flush(self, seconds: float = _CONNECTION_TIMEOUT_S) -> None:
        """Wait up to `seconds` until all reports are sent."""
        deadline = time.monotonic() + seconds
        while self._jobs.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _device(self, details: bool = False) -> dict[str, Any]:
        """Describe this machine in the service's JSON format."""
        machine_details = self._machine.details
        device: dict[str, Any] = {"kind": self._machine.kind, "identity": self._machine.identity}
        if isinstance(machine_details.get(_FEATURES), Mapping):
            device[_FEATURES] = dict(machine_details[_FEATURES])
        if isinstance(machine_details.get("shared_bytes"), int):
            device["shared_bytes"] = machine_details["shared_bytes"]
        if details:
            plain = {name: value for name, value in machine_details.items() if isinstance(value, str | int)}
            plain.pop("name", None)  # the host's name is private
            device["details"] = plain
        return device

    @staticmethod
    def _parse_answer(content: Any, configs: Sequence[Config] | None) -> ServiceAnswer:
        """Check an answer; raise ValueError unless its configuration is among `configs`."""
        try:
            choice = content["choices"][0]
            config, runtime_ns, sure = Config(choice["config"]), choice.get("runtime_ns"), choice.get("sure")
            source, measurements = choice["source"], int(choice["measurements"])
        except (LookupError, TypeError, AttributeError):
            raise ValueError("its answer is malformed") from None
        if source not in _SOURCES or not (sure is None or 0 <= float(sure) <= 1) or measurements < 0:
            raise ValueError("its answer is malformed")
        if configs is not None and config not in configs:
            raise ValueError("it chose a configuration that was not offered")
        if runtime_ns is not None and not 0 < float(runtime_ns) < _MAX_RUNTIME_NS:
            raise ValueError("its runtime is not a time")
        reason = f"the service's: {source}" + ("" if sure is None else f", {sure:.0%} sure")
        return ServiceAnswer(config, source, runtime_ns, measurements, reason)

    def _pause(self, reason: str) -> None:
        """Stop sending requests for a while; the first time, warn and give this reason."""
        self._paused_until = time.monotonic() + _RETRY_AFTER_S
        if not self._failure_reported:
            self._failure_reported = True
            # The reason may come from the network: no control characters on the user's terminal.
            printable = "".join(letter for letter in reason if letter.isprintable())
            self._say(f"the service at {self.url} is not used ({printable}); choosing on this machine")

    def _send(self, path: str, content: Mapping[str, Any], response: Future[Any] | None) -> None:
        """Queue a POST request for the background thread; `response` receives its answer, if given."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_requests, name="tilewise-service", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((path, json.dumps(content).encode(), response))
        except queue.Full:
            if response is not None:
                response.set_exception(OSError("too many requests are waiting"))

    def _send_requests(self) -> None:
        """Send queued requests one by one (thread target)."""
        while True:
            path, body, response = self._jobs.get()
            try:
                # A request whose caller has given up is not sent.
                if response is None or response.set_running_or_notify_cancel():
                    result = self._request(path, body)
                    if response is not None:
                        response.set_result(result)
            except Exception as error:
                self._disconnect()
                if response is not None:
                    response.set_exception(error)
            finally:
                self._jobs.task_done()

    def _request(self, path: str, body: bytes) -> Any:
        """Send a request and return its parsed response; a connection closed by the server is reopened once."""
        for is_new_connection in (self._connection is None, True):
            try:
                return self._post(path, body)
            except (http.client.HTTPException, OSError):
                self._disconnect()
                if is_new_connection:
                    raise
        return None

    def _post(self, path: str, body: bytes) -> Any:
        """Send a POST request and return the parsed JSON of the response."""
        if self._connection is None:
            if self._context is None:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECTION_TIMEOUT_S)
            else:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=_CONNECTION_TIMEOUT_S, context=self._context
                )
            self._connection = connection
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._connection.request("POST", self._path + path, body, headers)
        response = self._connection.getresponse()
        try:
            content = json.loads(response.read(_MAX_RESPONSE_BYTES))
        except (ValueError, RecursionError):
            content = None
        if response.status >= 300:
            detail = content.get("detail") if isinstance(content, dict) else None
            raise ValueError(str(detail or f"{response.status} {response.reason}")[:200])
        if content is None:
            raise ValueError("its answer is malformed")
        return content

    def _disconnect(self) -> None:
        """Close the connection if one is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
