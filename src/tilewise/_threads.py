"""Settings of the native kernels for the whole process: the number of threads, and batch-invariant mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilewise._extension import native
from tilewise.errors import ConfigurationError, UnavailableError


def set_num_threads(n: int) -> None:
    """Use ``n`` threads in the native kernels (1 to 1024). NumPy's BLAS has its own setting."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 1024:
        raise ConfigurationError(f"the number of threads must be an integer between 1 and 1024, not {n!r}")
    if native is not None:
        native.set_num_threads(n)


def get_num_threads() -> int:
    """Return the number of threads of the native kernels; 1 if they are not installed."""
    return int(native.num_threads()) if native is not None else 1


def set_batch_invariant(on: bool) -> None:
    """Give each row of a product the same bits for every number of rows, in the whole process.

    INT8 and four-bit products, norms, and attention over the same keys are invariant without it, and so is the number
    of threads. With it, float32 products sum over k in an order that depends on the weights alone, tuned tiles are not
    used, and a language model's native engine gives the same logits for every batch and every division of a prompt.
    """
    if native is not None:
        native.set_batch_invariant(bool(on))
    elif on:
        raise UnavailableError("Batch-invariant mode needs tilewise's compiled kernels, which are not installed.")


def get_batch_invariant() -> bool:
    """Return True if batch-invariant mode is on."""
    return bool(native is not None and native.batch_invariant())


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Set batch-invariant mode inside a `with` statement.

    >>> with tilewise.batch_invariant():
    ...     y = model(x)  # doctest: +SKIP
    """
    previous = get_batch_invariant()
    set_batch_invariant(on)
    try:
        yield
    finally:
        set_batch_invariant(previous)
