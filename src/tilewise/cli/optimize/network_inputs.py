"""`--shape` and `--input` of commands that run somebody's ONNX file: `run`, `profile`, `tune`, `quantize`, `prune`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from tilewise.onnx import Network

InputShapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Shape of an ONNX file's input, such as x=1x3x224x224; may be repeated."),
]
InputFiles = Annotated[
    list[str] | None,
    typer.Option("--input", help="An ONNX file's input: x=x.npy (may be repeated), or one .npz file with all."),
]
_SIZES = re.compile(r"\d+(x\d+)*", re.IGNORECASE)
_MAX_BYTES = 1 << 33  # of one input file; arbitrary, more than any input that fits into memory


def network_inputs(
    network: Network,
    shapes: Iterable[str] | None = None,
    files: Iterable[str] | None = None,
    **sizes: Any,
) -> list[Any]:
    """Return one array per input of a network: from files, else random of a given shape or one that the file allows.

    `sizes` are those of `Network.example`: batch, seed, free, pixels.
    """
    arrays = input_arrays(network, files or ())
    shapes_by_name = {name: array.shape for name, array in arrays.items()}
    for text in shapes or ():
        name, value = _split(network, text, "--shape")
        if not _SIZES.fullmatch(value):
            raise ConfigurationError(f"--shape takes sizes such as 1x3x224x224, not {value!r}")
        if name in shapes_by_name:
            raise ConfigurationError(f"the shape of the input {name!r} is given twice")
        shapes_by_name[name] = tuple(int(size) for size in value.lower().split("x"))
    examples = network.example(shapes=shapes_by_name, **sizes)
    return [arrays.get(port.name, x) for port, x in zip(network.inputs, examples, strict=True)]


def inputs_for(
    model: str, shapes: Iterable[str] | None, files: Iterable[str] | None, **sizes: Any
) -> Callable[[Network], list[Any]] | None:
    """Return the function that creates the inputs of an ONNX file; None for other models, without such options."""
    if model.endswith(".onnx"):
        return lambda network: network_inputs(network, shapes, files, **sizes)
    if shapes or files:
        raise ConfigurationError(f"--shape and --input are for ONNX files, and {model} is none")
    return None


def input_arrays(network: Network, files: Iterable[str], option: str = "--input") -> dict[str, Any]:
    """Read arrays by the input's name from `name=x.npy`, from `x.npy` for the only input, or from an .npz file."""
    arrays: dict[str, Any] = {}
    for text in files:
        from tilewise.costmodel.data.npz import read_npy, read_npz  # loads much, so only where there are files

        if Path(text).suffix == ".npz" and "=" not in text:
            names = [port.name for port in network.inputs]
            members = read_npz(Path(text), (), [*names, "arr_0"], _MAX_BYTES)
            if len(names) == 1 and "arr_0" in members:  # as numpy.savez names an array without a name
                members.setdefault(names[0], members["arr_0"])
            arrays |= {name: members[name] for name in names if name in members}
            if not arrays:
                raise ConfigurationError(f"{text} has none of the inputs {', '.join(names)}")
            continue
        name, path = _split(network, text, option)
        if name in arrays:
            raise ConfigurationError(f"{option} names the input {name!r} twice")
        arrays[name] = read_npy(Path(path), _MAX_BYTES)
    return arrays


def _split(network: Network, text: str, option: str) -> tuple[str, str]:
    """Split `name=value`; the name may be left out if the network has one input."""
    names = [port.name for port in network.inputs]
    name, separator, value = text.rpartition("=")
    if not separator and len(names) == 1:
        return names[0], text
    if not separator:
        raise ConfigurationError(f"{network.title} takes {len(names)} inputs; write {option} {names[0]}={text}")
    if name not in names:
        raise ConfigurationError(f"{network.title} has no input {name!r}; {did_you_mean(name, names)}")
    return name, value
