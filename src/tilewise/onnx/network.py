"""`load(path)`: an ONNX file as a module.

The network keeps the file's nodes as steps in an order in which they can run. A step is a layer of nn or an operation
(layers.py); a convolution with the norm and activation behind it is one step, a `Sequential`, which knows how to run
them in one pass. Values are let go after their last reader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.errors import DtypeError, FileFormatError, ShapeError, TilewiseError, UnavailableError
from tilewise.nn import Module, Parameter, Sequential
from tilewise.onnx import layers
from tilewise.onnx.building import Builder, LayerCall, unique, with_ends
from tilewise.onnx.example import batch_conflicts, example_inputs, fixed_dimension_error
from tilewise.onnx.graph import Array, OnnxGraph, Port
from tilewise.onnx.operators import TABLE, Value, array, most_alive, room_for, tensor
from tilewise.onnx.reader import one_line, read_graph
from tilewise.tensor import Tensor


def load(path: str | os.PathLike[str]) -> Network:
    """The network of an ONNX file, in eval mode: call it with arrays or Tensors, in the order of its inputs.

    >>> model = tilewise.onnx.load("resnet18.onnx")  # doctest: +SKIP
    >>> logits = model(images)  # doctest: +SKIP
    """
    graph = read_graph(path)
    try:
        return Network(graph, Path(path).name).eval()
    except TilewiseError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError):
        raise FileFormatError(f"{path} has a node that does not hold together") from None


class Weights(Module):
    """The constants with a gradient that operations read: those that are no layer's own."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        for name, value in arrays.items():
            setattr(self, name, Parameter(value))


class Network(Module):
    """A module made from an ONNX graph. `inputs` and `outputs` say what it takes and gives.

    One output is a Tensor; several are a dict by name.
    """

    def __init__(self, graph: OnnxGraph, title: str = "the network") -> None:
        refuse_unsupported(graph, title)
        self.inputs, self.outputs, self.opset, self.title = graph.inputs, graph.outputs, graph.opset, title
        builder = Builder(graph, set(dir(Network)))
        self.steps = tuple(with_ends(builder.steps, {port.name for port in graph.outputs}))
        for name, layer in builder.layers.items():
            setattr(self, name, layer)
        used_names = set(dir(Module))
        self._names = {name: unique(name, used_names) for name in builder.trained}
        self.weights = Weights({own: graph.constants[name] for name, own in self._names.items()})
        self._constants = {n: a for n, a in graph.constants.items() if n in builder.read_names and n not in self._names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network on inputs in their order, by their names, or in a dict by their names."""
        by_name = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else None
        if by_name is not None:
            return super().__call__(**{**by_name, **kwargs})
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self._values(args, kwargs)
        input_bytes = sum(array(v).nbytes for v in values.values()) + sum(
            t._array.nbytes for _, t in self.named_tensors()
        )
        shapes = [tuple(values[port.name].shape) for port in self.inputs]
        with room_for(input_bytes):
            try:
                self._run(values)
            except ShapeError as error:
                for conflict in batch_conflicts(self.inputs, shapes):
                    raise ShapeError(f"{conflict}: {error}") from None
                raise
        results = {port.name: tensor(values[port.name]) for port in self.outputs}
        return next(iter(results.values())) if len(results) == 1 else results

    def is_as_loaded(self) -> bool:
        """Whether every layer is still of a kind that a file's nodes become."""
        from tilewise.onnx.resave import LAYERS

        layers_now = [getattr(self, step.layer) for step in self.steps]
        parts = [part for layer in layers_now for part in (list(layer) if isinstance(layer, Sequential) else [layer])]
        return all(isinstance(part, layers.Operator) or type(part) in LAYERS for part in parts)

    def constants(self) -> dict[str, Array]:
        """The arrays that operations read, by the names they have in the file."""
        return self._constants | {name: getattr(self.weights, own).data for name, own in self._names.items()}

    def _run(self, values: dict[str, Value]) -> None:
        alive = sum(array(value).nbytes for value in values.values())
        most = alive + most_alive()
        for step in self.steps:
            layer = getattr(self, step.layer)
            try:
                result = layer(*(values[name] if name else None for name in step.inputs))
            except TilewiseError:
                raise
            except MemoryError:
                raise UnavailableError(f"{step.nodes[0]} needs more memory than there is") from None
            except (ValueError, TypeError, IndexError, OverflowError, ArithmeticError, AttributeError) as error:
                shapes = ", ".join(str(values[n].shape) for n in step.inputs if n)
                raise ShapeError(
                    f"{step.nodes[0]} cannot work on {shapes or 'nothing'}: {_first_line(error)}"
                ) from None
            _keep(values, step, result)
            alive += sum(array(values[name]).nbytes for name in step.outputs if name)
            if alive > most:
                raise UnavailableError(f"up to {step.nodes[0]} the results take {alive >> 20} MiB, too many at a time")
            for name in step.done:
                alive -= array(values.pop(name)).nbytes

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Value]:
        values: dict[str, Value] = dict(self._constants)
        values |= {name: getattr(self.weights, own) for name, own in self._names.items()}
        return values | self._inputs(args, kwargs)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the inputs by name, checked and with the dtypes of the file."""
        names = [port.name for port in self.inputs]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or set(inputs) != set(names):
            raise ShapeError(one_line(f"{self.title} takes the inputs {', '.join(names) or 'none'}"))
        return {port.name: as_input(inputs[port.name], port) for port in self.inputs}

    def _plan_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Return the inputs in the order and the dtypes of the file."""
        values = self._inputs(args, kwargs)
        return [values[port.name]._array for port in self.inputs] if len(self.outputs) == 1 else None

    def example(self, batch: int | None = None, seed: int = 0, free: int = 8, **sizes: Any) -> list[Array]:
        """Random inputs that fit the file (see `example_inputs`)."""
        return example_inputs(self.inputs, batch, seed, free, **sizes)


def as_input(value: Any, port: Port) -> Tensor:
    """Convert an argument to the dtype of an input, and check its shape."""
    converted = value if isinstance(value, Tensor) else Tensor(value)
    if converted.dtype != port.dtype:
        if port.dtype.kind == "f" and converted.dtype.kind in "fiub":
            converted = converted.astype(port.dtype)
        elif port.dtype.kind in "iu" and converted.dtype.kind in "iub":
            converted = Tensor(converted.data.astype(port.dtype))
        else:
            raise DtypeError(one_line(f"the input {port.name} takes {port.dtype}, not {converted.dtype}"))
    problem = fixed_dimension_error(port, converted.shape, is_batch_free=True)  # nodes that insist on a batch say so
    if problem:
        raise ShapeError(problem)
    return converted


def refuse_unsupported(graph: OnnxGraph, title: str) -> None:
    """Name every operation that cannot be run, with its nodes, at once."""
    unsupported: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op not in TABLE:
            unsupported.setdefault(node.op, []).append(node.name)
    if unsupported:
        listing = "; ".join(f"{op} ({_some(names)})" for op, names in sorted(unsupported.items())[:40])
        raise UnavailableError(f"{title} uses operations that tilewise does not have: {one_line(listing)}")


def _some(names: list[str]) -> str:
    return ", ".join(n[:80] for n in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return one_line((str(error).splitlines() or [type(error).__name__])[0][:200])


def _keep(values: dict[str, Value], step: LayerCall, result: Any) -> None:
    results = result if isinstance(result, tuple) else (result,)
    for name, value in zip(step.outputs, results, strict=False):
        if name:
            values[name] = value
    if any(name and values.get(name) is None for name in step.outputs):  # a missing input may have been handed on
        raise FileFormatError(f"{step.nodes[-1]} makes {len(results)} results, not {len(step.outputs)}")
