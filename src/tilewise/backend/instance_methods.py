"""A metaclass that explains a method called on a class instead of an instance in one sentence."""

from functools import wraps
from types import FunctionType

from tilewise.errors import ConfigurationError


class ExplainsMethods(type):
    """Metaclass whose classes raise a clear error if a method is called on the class instead of an instance.

    Attributes of instances are not looked up here, so their method calls cost nothing more.
    """

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
