"""The protocol between harness and plugin: raw arrays over a pipe, whose shape and type follow from the event."""

from __future__ import annotations

import os
import select
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.events import Event

Array = npt.NDArray[Any]
Layout = tuple[tuple[int, ...], str]
_IMAGE_SHAPES: dict[str, tuple[int, ...]] = {"mlp": (64,), "cnn": (1, 8, 8)}  # the sandbox has no data sets


class Ended(Exception):
    """The other side has ended, or does not follow the protocol."""


def question_of(event: Event) -> Layout:
    """Return the shape and type of a question: a batch of images, or a prompt."""
    if event.kind == "images":
        return (event.batch, *_IMAGE_SHAPES[event.model_name]), "<f4"
    return (event.prompt_tokens,), "<i8"


def answer_of(event: Event) -> Layout:
    """Return the shape and type of an answer: logits of ten classes, or the new tokens."""
    return ((event.batch, 10), "<f4") if event.kind == "images" else ((event.new_tokens,), "<i8")


def send(descriptor: int, content: bytes | Array) -> None:
    """Write all bytes; raises Ended if the other side has closed the pipe."""
    view = memoryview(content if isinstance(content, bytes) else content.data).cast("B")
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        raise Ended("it stopped reading") from None


def receive(descriptor: int, count: int, timeout: float | None = None) -> bytes:
    """Read `count` bytes; raises Ended if nothing arrives for `timeout` seconds."""
    content = bytearray()
    while len(content) < count:
        if timeout is not None and not select.select([descriptor], [], [], timeout)[0]:
            raise Ended(f"it gave no answer within {timeout:g} s")
        chunk = os.read(descriptor, count - len(content))
        if not chunk:
            raise Ended("its process ended")
        content += chunk
    return bytes(content)


def decode(content: bytes, layout: Layout) -> Array:
    shape, dtype = layout
    return np.frombuffer(content, dtype).reshape(shape)
