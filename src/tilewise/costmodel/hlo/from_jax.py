"""Converts a JAX function to the graph that a cost model reads.

A function is named as ``package.module:function`` and lowered for example arguments, which the same module defines as
``<function>_args`` (a tuple, or a function that returns one). JAX traces the function; nothing is compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.costmodel.hlo.featurize import HloGraph, featurize_hlo
from tilewise.errors import ConfigurationError, UnavailableError


def featurize_jax(target: str) -> HloGraph:
    """Return the graph of the function named ``module:function``.

    >>> graph = featurize_jax("my_models.mlp:forward")  # doctest: +SKIP
    """
    return featurize_hlo(serialize_jax(target))


def serialize_jax(target: str) -> bytes:
    """Return the serialized ``HloModuleProto`` of the function named ``module:function``."""
    jax = _jax()
    function, arguments = _load(target)
    try:
        # Lowering stops before the compiler: HLO as JAX emits it, without fusions.
        lowering = jax.jit(function).lower(*arguments)
        module = lowering.compiler_ir(dialect="hlo")
        return bytes(module.as_serialized_hlo_module_proto())
    except Exception as error:  # the user's function runs here and may raise anything
        raise ConfigurationError(f"JAX could not lower {target}: {_first_line(error)}") from error


def _jax() -> Any:
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise UnavailableError("Reading a JAX function needs JAX: pip install jax.") from error


def _load(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import the function and its example arguments."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ConfigurationError(f"{target!r} does not name a function; write package.module:function.")
    # A console script does not have the current folder on its path, where the user's module usually is.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs here and may raise anything
        raise ConfigurationError(f"{module_name} cannot be imported: {_first_line(error)}") from error
    function = getattr(module, function_name, None)
    arguments = getattr(module, f"{function_name}_args", None)
    if not callable(function):
        raise ConfigurationError(f"{module_name} has no function {function_name}.")
    arguments = arguments() if callable(arguments) else arguments
    if not isinstance(arguments, tuple):
        raise ConfigurationError(f"{module_name} must define example arguments as the tuple {function_name}_args.")
    return function, arguments


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
