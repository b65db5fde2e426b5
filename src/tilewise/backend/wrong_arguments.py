"""Explain why a constructor failed, from its annotations; imported only after one has failed."""

from collections.abc import Callable
from inspect import signature
from numbers import Integral, Real
from typing import Any, NoReturn

from tilewise.errors import ConfigurationError, TilewiseError, did_you_mean

_KINDS: dict[str, tuple[Any, str]] = {  # what an annotation accepts
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "Size": (Integral | tuple, "an integer or a pair of integers"),
}


def raise_explained(
    error: Exception, name: str, init: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]
) -> NoReturn:
    """Raise ConfigurationError about the first wrong argument of a constructor; `error` itself if none is found."""
    if isinstance(error, TilewiseError):
        raise error
    parameters = signature(init).parameters
    names = list(parameters)[1:]
    for option in options:
        if option not in names:
            advice = did_you_mean(option, names)
            raise ConfigurationError(f"{name} has no argument {option!r}; {advice}") from None
    for argument, value in (dict(zip(names, args, strict=False)) | options).items():
        kind, words = _KINDS.get(parameters[argument].annotation, (object, ""))
        if isinstance(value, str | float) and not isinstance(value, kind):
            raise ConfigurationError(f"{name}: {argument} must be {words}, not {value!r}") from None
        if kind is Integral and isinstance(value, int) and value < 0:
            raise ConfigurationError(f"{name}: {argument} must not be negative, as {value} is") from None
    raise error
