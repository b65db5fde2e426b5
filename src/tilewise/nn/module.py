"""Module: a layer with parameters, and Sequential, a chain of layers.

A module's tensors are its attributes: a `Parameter` is trained, any other Tensor is state that is saved (running
means), and modules inside it bring theirs under a dotted name, so that names equal PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from tilewise import _events
from tilewise._events import recorders
from tilewise.errors import ConfigurationError, DtypeError, ShapeError
from tilewise.tensor import Tensor, TensorLike


class Parameter(Tensor):
    """A tensor that a module trains."""

    __slots__ = ()

    def __init__(self, data: TensorLike, requires_grad: bool = True) -> None:
        super().__init__(data, requires_grad=requires_grad)


class Module:
    """Base class of layers and models. Set Parameters and Modules as attributes; write `forward`."""

    training: bool = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to compute its result")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recorders:
            return _events.record_module(self, self.forward, args, kwargs)
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        from tilewise.nn.describe import tree

        return tree(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        import html

        return f"<pre>{html.escape(repr(self))}</pre>"

    # --- what is inside ---

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all inside it, with dotted names."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved state, with dotted names; a tensor reachable twice comes under both."""
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}.{name}" if prefix else name, value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()
        for name, value in self.named_tensors():
            if isinstance(value, Parameter) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    # --- modes ---

    def train(self, mode: bool = True) -> Self:
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Turn every floating-point tensor into `dtype`, in place."""
        for _, tensor in self.named_tensors():
            if tensor.dtype.kind == "f":
                tensor.data = tensor.data.astype(dtype, copy=False)
                tensor.grad = None
        return self

    # --- saving ---

    def state_dict(self) -> dict[str, Tensor]:
        """Name to tensor, sharing memory with the module."""
        return {name: tensor.detach() for name, tensor in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy tensors (ours, NumPy's or PyTorch's) into this module; names, shapes and number kinds must fit."""
        own = dict(self.named_tensors())
        if strict and own.keys() != state.keys():
            raise ConfigurationError(_name_mismatch(set(own), set(state)))
        values = {name: _fitting(name, np.asarray(state[name]), own[name]) for name in own if name in state}
        for name, value in values.items():  # only now, so that a bad entry changes nothing
            own[name].data[...] = value
            own[name]._version[0] += 1


def lay_in_order(parameters: Iterable[Parameter]) -> None:
    """Move float32 parameters into one block of memory, each at a multiple of 64 bytes. A model that is too large for
    the caches is then read as one run of addresses, in the large pages that NumPy asks for from 4 MiB on."""
    line = 16  # floats
    moved = [p for p in parameters if p.dtype == np.float32]
    block = np.empty(sum(-(-p.size // line) * line for p in moved) + line, np.float32)
    at = -(block.ctypes.data // 4) % line
    for parameter in moved:
        place = block[at : at + parameter.size].reshape(parameter.shape)
        place[...] = parameter.data
        parameter.data = place
        at += -(-parameter.size // line) * line


def _name_mismatch(own: set[str], given: set[str]) -> str:
    parts = []
    if own - given:
        parts.append(f"lacks {_some(own - given)}")
    if given - own:
        parts.append(f"has {_some(given - own)} which the model does not")
    return f"this state does not belong to this model: it {' and '.join(parts)}"


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _fitting(name: str, value: npt.NDArray[Any], own: Tensor) -> npt.NDArray[Any]:
    if value.shape != own.shape:
        raise ShapeError(f"{name} has shape {value.shape} in the state and {own.shape} in the model")
    if value.dtype.kind != own.dtype.kind:
        raise DtypeError(f"{name} is {value.dtype} in the state and {own.dtype} in the model")
    return value


class Sequential(Module):
    """Layers one after another, numbered as in PyTorch.

    A linear or convolution layer takes the ReLU after it along in one pass over memory. In inference (`eval`, under
    `no_grad`) it takes a GELU as well, and a batch norm between convolution and ReLU is folded into the weights.
    """

    def __init__(self, *layers: Module) -> None:
        for i, layer in enumerate(layers):
            setattr(self, str(i), layer)

    def layers(self) -> list[Module]:
        return list(self.children())

    def __len__(self) -> int:
        return len(self.layers())

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers())

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Module:
        return Sequential(*self.layers()[index]) if isinstance(index, slice) else self.layers()[index]

    def __setitem__(self, index: int, layer: Module) -> None:
        setattr(self, str(range(len(self))[index]), layer)

    def forward(self, x: Tensor) -> Tensor:
        waiting = self.layers()
        while waiting:
            first = waiting[0]
            if not isinstance(first, Fusing):
                x, used = first(x), 1
            elif recorders:
                x, used = _events.record_module(first, first.forward_with, (x, waiting), {})
            else:
                x, used = first.forward_with(x, waiting)
            del waiting[:used]
        return x


class ModuleList(Sequential):
    """Numbered modules without an order of execution."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a ModuleList holds modules; call them one by one")


class Fusing(Module):
    """A layer that can take layers after it along."""

    def forward_with(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """The result of the first few of `layers` (this one first), and how many that was."""
        raise NotImplementedError
