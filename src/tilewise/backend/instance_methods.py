"""A metaclass that explains a wrong keyword of a class, and a method called on it, in one sentence."""

from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any

from tilewise.errors import ConfigurationError, did_you_mean


class ExplainsMethods(type):
    """Metaclass of classes with clear errors for unknown keywords and for methods called without an instance.

    Attributes of instances are not looked up here, so their method calls cost nothing more.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Create an instance; for an unknown keyword, raise ConfigurationError with the most similar one."""
        try:
            return super().__call__(*args, **options)
        except TypeError:
            names = list(signature(super().__getattribute__("__init__")).parameters)[1:]
            for name in options:
                if name not in names:
                    advice = did_you_mean(name, names)
                    raise ConfigurationError(f"{cls.__name__} has no argument {name!r}; {advice}") from None
            raise

    def __getattribute__(cls, name: str) -> object:
        """Wrap a method, so that a call without an instance raises a clear error; return others as is."""
        value = super().__getattribute__(name)
        if name.startswith("_") or not isinstance(value, FunctionType):
            return value
        if isinstance(next(base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), staticmethod):
            return value

        @wraps(value)
        def method(*args: object, **options: object) -> object:
            """Call the method, or raise ConfigurationError if the first argument is not an instance."""
            if not args or not isinstance(args[0], cls):
                call = f"{cls.__name__}(...).{name}(...)"
                raise ConfigurationError(f"{cls.__name__}.{name} belongs to an instance: make one first, as in {call}")
            return value(*args, **options)

        return method
