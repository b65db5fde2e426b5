"""Clear errors for wrong arguments of constructors, and for methods that are called on the class."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from tilewise.errors import ConfigurationError


class ExplainsConstructors:
    """Base of classes whose constructors, if they are tilewise's own, explain arguments of a wrong type."""

    def __init_subclass__(cls) -> None:
        """Wrap the class's constructor."""
        super().__init_subclass__()
        if "__init__" in vars(cls) and cls.__module__.startswith("tilewise."):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor, so that arguments of a wrong type raise ConfigurationError."""

    @wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except (TypeError, ValueError, IndexError) as error:
            from tilewise.backend.wrong_arguments import raise_explained

            raise_explained(error, type(self).__name__, init, args, options)

    return wrapper


class ExplainsMethods(type):
    """Metaclass of classes with clear errors for unknown keywords and for methods called without an instance.

    Attributes of instances are not looked up here, so their method calls cost nothing more.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Create an instance; for a wrong argument, raise ConfigurationError."""
        try:
            return super().__call__(*args, **options)
        except TypeError as error:
            from tilewise.backend.wrong_arguments import raise_explained

            raise_explained(error, cls.__name__, super().__getattribute__("__init__"), args, options)

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
