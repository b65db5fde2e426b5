"""The protocol between harness and plugin: raw arrays over a pipe, whose shape and type follow from the event.

The harness's ends of the pipes do not block, and every transfer has a deadline. A plugin can make its pipe smaller and
stop reading, or send one byte a minute: neither holds the harness.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.events import Event

Array = npt.NDArray[Any]
Layout = tuple[tuple[int, ...], str]
_IMAGE_SHAPES: dict[str, tuple[int, ...]] = {"mlp": (64,), "cnn": (1, 8, 8)}  # the sandbox has no data sets


class Ended(Exception):
    """The other side has ended, or does not follow the protocol."""


class Late(Ended):
    """The other side did not read or answer in time."""


def question_of(event: Event) -> Layout:
    """Return the shape and dtype of an event's question: a batch of images, or a prompt."""
    if event.kind == "images":
        return (event.batch, *_IMAGE_SHAPES[event.model_name]), "<f4"
    return (event.prompt_tokens,), "<i8"


def answer_of(event: Event) -> Layout:
    """Return the shape and type of an answer: logits of ten classes, or the new tokens."""
    return ((event.batch, 10), "<f4") if event.kind == "images" else ((event.new_tokens,), "<i8")


def send(descriptor: int, content: bytes | Array, deadline: float | None = None) -> None:
    """Write all bytes to a pipe; raise Late at `deadline` (monotonic seconds), Ended if the pipe is closed."""
    view = memoryview(content if isinstance(content, bytes) else content.data).cast("B")
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            _wait(writing=descriptor, deadline=deadline)
        except OSError:
            raise Ended("it stopped reading") from None


def receive(descriptor: int, count: int, deadline: float | None = None) -> bytes:
    """Read exactly `count` bytes from a pipe; raise Late at `deadline` (monotonic seconds)."""
    content = bytearray()
    while len(content) < count:
        _wait(reading=descriptor, deadline=deadline)
        chunk = os.read(descriptor, count - len(content))
        if not chunk:
            raise Ended("its process ended")
        content += chunk
    return bytes(content)


def _wait(deadline: float | None, reading: int | None = None, writing: int | None = None) -> None:
    """Wait until a file descriptor is ready; raise Late at `deadline`, even if it becomes ready at that moment."""
    seconds = None if deadline is None else deadline - time.monotonic()
    reads, writes = ([] if descriptor is None else [descriptor] for descriptor in (reading, writing))
    if (seconds is not None and seconds <= 0) or not any(select.select(reads, writes, [], seconds)):
        raise Late("it did not answer in time")


def decode(content: bytes, layout: Layout) -> Array:
    """Convert the bytes of a message to an array of this shape and dtype."""
    shape, dtype = layout
    return np.frombuffer(content, dtype).reshape(shape)
