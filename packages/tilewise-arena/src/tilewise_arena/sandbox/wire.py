"""Numbers over a pipe between harness and plugin: bare arrays of a shape and type that both ends know from the
event."""

from __future__ import annotations

import os
import select
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.events import Event

Array = npt.NDArray[Any]
Layout = tuple[tuple[int, ...], str]
_IMAGE_SHAPES: dict[str, tuple[int, ...]] = {"mlp": (64,), "cnn": (1, 8, 8)}  # the jail has no data set to ask


class Ended(Exception):
    """The other side is gone, or does not speak this language."""


def question_of(event: Event) -> Layout:
    """Shape and type of a question: a batch of images, or a prompt."""
    if event.kind == "images":
        return (event.batch, *_IMAGE_SHAPES[event.model_name]), "<f4"
    return (event.prompt_tokens,), "<i8"


def answer_of(event: Event) -> Layout:
    """Shape and type of an answer: logits of ten classes, or the new tokens."""
    return ((event.batch, 10), "<f4") if event.kind == "images" else ((event.new_tokens,), "<i8")


def send(descriptor: int, content: bytes | Array) -> None:
    view = memoryview(content if isinstance(content, bytes) else content.data).cast("B")
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        raise Ended("it stopped reading") from None


def receive(descriptor: int, count: int, timeout: float | None = None) -> bytes:
    """So many bytes; Ended when nothing comes for `timeout` seconds."""
    parts = bytearray()
    while len(parts) < count:
        if timeout is not None and not select.select([descriptor], [], [], timeout)[0]:
            raise Ended(f"it gave no answer within {timeout:g} s")
        piece = os.read(descriptor, count - len(parts))
        if not piece:
            raise Ended("its process ended")
        parts += piece
    return bytes(parts)


def decode(content: bytes, layout: Layout) -> Array:
    shape, kind = layout
    return np.frombuffer(content, kind).reshape(shape)
