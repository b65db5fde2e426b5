"""A metaclass that explains a method called on a class instead of an instance in one sentence."""

from functools import wraps
from types import FunctionType

from tilewise.errors import ConfigurationError


class ExplainsMethods(type):
    """Metaclass of classes whose methods people call without making an instance: the error says to make one.

    Attributes of instances are not looked up here, so their method calls cost nothing more.
    """

    def __getattribute__(cls, name: str) -> object:
        """Return a method that checks for an instance first; any other attribute as it is."""
        value = super().__getattribute__(name)
        if name.startswith("_") or not isinstance(value, FunctionType):
            return value
        if isinstance(next(base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), staticmethod):
            return value

        @wraps(value)
        def method(*args: object, **options: object) -> object:
            if not args or not isinstance(args[0], cls):
                call = f"{cls.__name__}(...).{name}(...)"
                raise ConfigurationError(f"{cls.__name__}.{name} belongs to an instance: make one first, as in {call}")
            return value(*args, **options)

        return method
