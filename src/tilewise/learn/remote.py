"""Message channel and serialization for calling a reader's function in another, untrusted process.

Messages are lines of JSON. Numbers, strings, lists, tuples, dicts, slices and arrays are sent by value. A function or
an object in an argument stays in the checking process; uses of it in the other process are sent back as requests.
Changes that the answer makes to array and list arguments are copied back, and a view of an argument stays a view. The
verdict is made in a process that never runs the reader's code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MAX_MESSAGE_BYTES = 64 << 20  # arbitrary; bounds the memory that an answer can make the checker use
_METHODS = ("__getitem__", "__matmul__", "__rmatmul__", "__array__")
_ATTRIBUTES = ("shape", "dtype", "ndim")


class ConnectionLost(Exception):
    """The other process ended, or sent something that is not a message."""


class MessageChannel:
    """One end of a pair of pipes for messages of bounded length, with a deadline (monotonic seconds)."""

    def __init__(self, reading: int, writing: int, deadline: float | None = None) -> None:
        """Store the file descriptors to read from and write to."""
        self._reading, self._writing, self.deadline = reading, writing, deadline
        self._buffer = bytearray()
        self.computing_seconds: Callable[[], float | None] = lambda: None  # CPU time of the other process
        self._computing_limit: float | None = None
        self._last = deadline
        if deadline is not None:  # the other side can shrink its pipe and stop reading
            os.set_blocking(writing, False)

    def limit(self, seconds: float, longest: float) -> None:
        """Allow the other process `seconds` of computing from now on, and at most `longest` seconds in all."""
        used = self.computing_seconds()
        self._computing_limit = None if used is None else used + seconds
        self.deadline, self._last = time.monotonic() + seconds, time.monotonic() + longest

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as one line of JSON; raise ConnectionLost if the other process does not read it."""
        view = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while view:
                self._wait([], [self._writing])
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._writing, view[:65536]) :]
        except OSError:
            raise ConnectionLost("it stopped reading") from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next message; raise ConnectionLost or TimeoutError if there is none."""
        while (end := self._buffer.find(b"\n")) < 0:
            self._wait([self._reading], [])
            piece = os.read(self._reading, 1 << 20)
            if not piece or len(self._buffer) > MAX_MESSAGE_BYTES:
                raise ConnectionLost("its process ended")
            self._buffer += piece
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionLost("it wrote something other than an answer")
        return message

    def _wait(self, reading: list[int], writing: list[int]) -> None:
        """Wait until a file descriptor is ready for reading or writing; TimeoutError at the deadline."""
        if self.deadline is not None:
            seconds_left = self.deadline - time.monotonic()
            while seconds_left <= 0 or not any(select.select(reading, writing, [], seconds_left)):
                seconds_left = self._more_seconds()
                if seconds_left <= 0:
                    raise TimeoutError

    def _more_seconds(self) -> float:
        """Extend the deadline if the process did not get the CPU time it may use; return the extension."""
        used, now = self.computing_seconds(), time.monotonic()
        if used is None or self._computing_limit is None or self._last is None:
            return 0.0
        self.deadline = min(now + self._computing_limit - used, self._last)
        return self.deadline - now if self.deadline > now + 0.01 else 0.0


class Codec:
    """Converts values to JSON and back for the other process.

    `local_objects` are objects that stay in this process; `views` are arrays that both processes have.
    """

    def __init__(self, ask: Callable[[int, str, Sequence[Any]], Any] | None = None) -> None:
        self.local_objects: list[Any] = []
        self.views: list[Any] = []
        self._ask = ask

    def encode(self, value: Any) -> list[Any]:
        """Encode a value as a list: a letter for its kind, then its contents."""
        if value is None or isinstance(value, bool | int | float | str):
            return ["j", value]
        if isinstance(value, list | tuple):
            return ["l" if isinstance(value, list) else "t", [self.encode(item) for item in value]]
        if isinstance(value, dict):
            return ["d", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return self._view(value) or ["a", value.dtype.str, np.shape(value), _text(value)]
        if isinstance(value, slice):
            return ["x", [self.encode(part) for part in (value.start, value.stop, value.step)]]
        if isinstance(value, np.random.Generator):
            return ["g", value.bit_generator.state]
        if value is Ellipsis:
            return ["e"]
        if self._ask is None and (callable(value) or hasattr(value, "__getitem__")):
            self.local_objects.append(value)
            facts = {name: self.encode(_plain(getattr(value, name))) for name in _ATTRIBUTES if hasattr(value, name)}
            return ["f", len(self.local_objects) - 1, facts]
        return ["?", repr(value)[:80]]

    def decode(self, encoded: Any, depth: int = 0) -> Any:
        """Decode a value; malformed input raises ValueError, TypeError, IndexError, KeyError or ArithmeticError."""
        if depth > 20:
            raise ValueError("nested too deeply")
        kind, *fields = encoded
        if kind == "j":
            return fields[0] if fields[0] is None or isinstance(fields[0], bool | int | float | str) else 1 / 0
        if kind in "lt":
            items = [self.decode(item, depth + 1) for item in fields[0]]
            return items if kind == "l" else tuple(items)
        if kind == "d":
            return {self.decode(key, depth + 1): self.decode(item, depth + 1) for key, item in fields[0]}
        if kind == "a":
            dtype, shape, text = fields
            array = np.frombuffer(base64.b64decode(text), _dtype(dtype)).reshape([int(n) for n in shape]).copy()
            return array if array.ndim else array[()]
        if kind == "w":
            at, dtype, offset, shape, strides = fields
            return np.ndarray(shape, _dtype(dtype), self.views[at], offset, strides)  # NumPy checks the bounds
        if kind == "x":
            return slice(*(self.decode(part, depth + 1) for part in fields[0]))
        if kind == "g":
            return _generator(fields[0])
        if kind == "f" and self._ask is not None:
            facts = {name: self.decode(value) for name, value in fields[1].items()}
            return RemoteObject(int(fields[0]), facts, self._ask)
        return Ellipsis if kind == "e" else OpaqueValue(str(fields[0]))

    def _view(self, value: Any) -> list[Any] | None:
        """Encode an array as a view of one that both processes have; None if it is not one."""
        for at, whole in enumerate(self.views):
            if isinstance(whole, np.ndarray) and isinstance(value, np.ndarray) and np.shares_memory(value, whole):
                offset = value.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
                return ["w", at, value.dtype.str, offset, value.shape, value.strides]
        return None


class OpaqueValue:
    """Stand-in for a value of the other process that cannot be sent, of which only the repr is known."""

    def __init__(self, text: str) -> None:
        self._text_of_value = text

    def __repr__(self) -> str:
        return self._text_of_value


class RemoteObject:
    """Stand-in for a function or array-like object of the other process, which serves each use of it."""

    shape: tuple[int, ...] = ()

    def __init__(self, number: int, facts: dict[str, Any], ask: Callable[[int, str, Sequence[Any]], Any]) -> None:
        self._number, self._ask = number, ask
        for name, value in facts.items():
            setattr(self, name, np.dtype(value) if name == "dtype" else value)

    def __call__(self, *args: Any) -> Any:
        return self._ask(self._number, "__call__", args)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> Any:
        return self._ask(self._number, "__getitem__", (key,))

    def __matmul__(self, _: Any) -> Any:
        return self._ask(self._number, "__matmul__", (None,))

    __rmatmul__ = __matmul__

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        whole = self._ask(self._number, "__array__", ())
        return whole if dtype is None else whole.astype(dtype)


def handle_request(local_objects: Sequence[Any], number: int, name: str, args: Sequence[Any]) -> Any:
    """Perform a request of the other process on a local object; only calls and _METHODS are allowed."""
    target = local_objects[number]
    if name == "__call__" and callable(target):
        return target(*args)
    if name not in _METHODS or not hasattr(target, name):
        raise ValueError("nothing of that kind is offered")
    return getattr(target, name)(*args)


def _plain(value: Any) -> Any:
    return value.str if isinstance(value, np.dtype) else value


def _dtype(name: Any) -> np.dtype[Any]:
    """Parse the name of a dtype; only numbers and booleans are allowed."""
    dtype = np.dtype(str(name))
    if dtype.kind not in "biufc":
        raise ValueError("an array holds numbers")
    return dtype


def _text(value: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()


def _generator(state: dict[str, Any]) -> np.random.Generator:
    """Create a NumPy random generator with a given state."""
    generator = np.random.default_rng(0)
    generator.bit_generator.state = state
    return generator
