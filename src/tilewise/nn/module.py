"""Module: a layer with parameters, and Sequential, a chain of layers.

A module's tensors are its attributes: a `Parameter` is trained, any other Tensor is saved state (such as running
means). The tensors of inner modules have dotted names, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from tilewise._events import recorders
from tilewise.backend.instance_methods import ExplainsConstructors
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, type_name
from tilewise.nn.inputs import call_with_arrays, needs_conversion
from tilewise.nn.self_planning import infer, structure
from tilewise.tensor import Tensor, TensorLike, is_grad_enabled


class WatchedTensor(Tensor):
    """Tensor that counts how often its array was handed out and may therefore have been changed."""

    __slots__ = ("exposures",)

    exposures: int

    def __init__(self, data: TensorLike, requires_grad: bool = False) -> None:
        self.exposures = 0
        super().__init__(data, requires_grad=requires_grad)

    @property
    def data(self) -> npt.NDArray[Any]:
        """The underlying array, not a copy."""
        self.exposures += 1
        return self._array

    @data.setter
    def data(self, array: npt.NDArray[Any]) -> None:
        self.exposures += 1
        self._array = array

    def _expose(self) -> None:
        self.exposures += 1


class Parameter(WatchedTensor):
    """A tensor that a module trains."""

    __slots__ = ()

    def __init__(self, data: TensorLike, requires_grad: bool = True) -> None:
        super().__init__(data, requires_grad=requires_grad)


class Buffer(WatchedTensor):
    """A tensor that a module saves and does not train, such as a running mean."""

    __slots__ = ()


class Module(ExplainsConstructors):
    """Base class of layers and models. Set Parameters and Modules as attributes; write `forward`.

    Call a module with Tensors, NumPy arrays or PyTorch tensors; `forward` gets Tensors. The result is a Tensor, but in
    eval mode PyTorch tensors give a PyTorch tensor.
    """

    training: bool = True
    takes_arrays: bool = False  # True: `forward` gets arrays as they are
    depends_on_mode: bool = False  # of tilewise's own classes: whether `forward` reads `training`
    reports_readers: bool = False  # whether `forward` reads the numbers of tensors by `Tensor.data` only
    plans_itself: bool = True  # False: a module that contains this one always runs layer by layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`; in eval mode by a compiled plan if there is one, and recorded if a profiler is active."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        if first.__class__ is not Tensor and not self.takes_arrays and needs_conversion(first):
            return call_with_arrays(self, args, kwargs)
        if recorders:
            return recorders.hooks.record_module(self, self.forward, args, kwargs)
        if self.training or is_grad_enabled():
            return self.forward(*args, **kwargs)
        return infer(self, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        structure.count += 1

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        structure.count += 1

    def _plan_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[npt.NDArray[Any]] | None:
        """Return a call's inputs as arrays for a plan; None if a plan cannot run this call."""
        if kwargs or not all(isinstance(value, Tensor) for value in args):
            return None
        return [value._array for value in args]

    def holds_weights(self) -> bool:
        """Whether this module has tensors of its own, in contrast to those of its submodules."""
        return any(isinstance(value, Tensor) for value in vars(self).values())

    def __repr__(self) -> str:
        from tilewise.nn.describe import tree

        return tree(self)

    def _repr_html_(self) -> str:
        """Return the module's tree as HTML for notebooks."""
        import html

        return f"<pre>{html.escape(repr(self))}</pre>"

    # --- inner modules and tensors ---

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the direct submodules with their attribute names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) for this module and all its descendants."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, tensor) for parameters and buffers; a shared tensor appears under each name."""
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}.{name}" if prefix else name, value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted name, parameter), each parameter once."""
        visited: set[int] = set()
        for name, value in self.named_tensors():
            if isinstance(value, Parameter) and id(value) not in visited:
                visited.add(id(value))
                yield name, value

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    # --- modes ---

    def train(self, mode: bool = True) -> Self:
        """Set train mode (or eval mode) in this module and all its submodules, and return it."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Convert every floating-point tensor to `dtype`, in place."""
        for _, tensor in self.named_tensors():
            if tensor.dtype.kind == "f":
                tensor.data = tensor.data.astype(dtype, copy=False)
                tensor.grad = None
        return self

    # --- saving ---

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by dotted name; they share memory with the module."""
        return {name: tensor.detach() for name, tensor in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy arrays or tensors into this module; shapes, dtype kinds and, if `strict`, names must match."""
        own = dict(self.named_tensors())
        if strict and own.keys() != state.keys():
            raise ConfigurationError(_name_mismatch(set(own), set(state)))
        values = {name: _checked_value(name, np.asarray(state[name]), own[name]) for name in own if name in state}
        for name, value in values.items():  # after all checks, so that an invalid entry changes nothing
            own[name].data[...] = value
            own[name]._version[0] += 1


def pack_parameters(parameters: Iterable[Parameter]) -> None:
    """Move float32 parameters into one contiguous block of memory, each aligned to 64 bytes.

    A model that is larger than the caches is then read sequentially, and NumPy uses huge pages for blocks of 4 MiB or
    more.
    """
    cache_line = 16  # floats in 64 bytes
    packed = [p for p in parameters if p.dtype == np.float32]
    block = np.empty(sum(-(-p.size // cache_line) * cache_line for p in packed) + cache_line, np.float32)
    offset = -(block.ctypes.data // 4) % cache_line
    for parameter in packed:
        data = block[offset : offset + parameter.size].reshape(parameter.shape)
        data[...] = parameter.data
        parameter.data = data
        offset += -(-parameter.size // cache_line) * cache_line


def _name_mismatch(own: set[str], state: set[str]) -> str:
    """Return a sentence about the names that are missing from `state` and those it has in excess."""
    problems = []
    if own - state:
        problems.append(f"lacks {_first_names(own - state)}")
    if state - own:
        problems.append(f"has {_first_names(state - own)} which the model does not")
    return f"this state does not belong to this model: it {' and '.join(problems)}"


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _checked_value(name: str, value: npt.NDArray[Any], own: Tensor) -> npt.NDArray[Any]:
    """Return `value` if its shape and kind of dtype are those of the parameter `own`, else raise."""
    if value.shape != own.shape:
        raise ShapeError(f"{name} has shape {value.shape} in the state and {own.shape} in the model")
    if value.dtype.kind != own.dtype.kind:
        raise DtypeError(f"{name} is {value.dtype} in the state and {own.dtype} in the model")
    return value


class Sequential(Module):
    """Layers in sequence, numbered as in PyTorch.

    A ReLU is fused into the linear or convolution layer before it. In inference (`eval`, under `no_grad`) a GELU is
    fused as well, and a batch norm after a convolution is folded into its weights.
    """

    def __init__(self, *layers: Module) -> None:
        """Number the layers from 0; anything else than a layer is refused, because it would not be run."""
        for i, layer in enumerate(layers):
            if not isinstance(layer, Module):
                hint = "; unpack it with *" if isinstance(layer, list | tuple) else ""
                raise ConfigurationError(f"{type(self).__name__} takes layers, not a {type_name(layer)}{hint}")
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
        """Run the layers in order; a fusible layer may run some of its successors as well."""
        remaining = self.layers()
        while remaining:
            first = remaining[0]
            if not isinstance(first, FusibleLayer):
                x, count = first(x), 1
            elif recorders:
                x, count = recorders.hooks.record_module(first, first.forward_fused, (x, remaining), {})
            else:
                x, count = first.forward_fused(x, remaining)
            del remaining[:count]
        return x


class ModuleList(Sequential):
    """Numbered modules without an order of execution, given as a list like PyTorch's or one by one."""

    def __init__(self, *modules: Module | Iterable[Module]) -> None:
        """Number the modules from 0."""
        lists = [[item] if isinstance(item, Module) else item for item in modules]
        super().__init__(*[module for items in lists for module in items])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a ModuleList has no forward(); call its modules one by one")


class FusibleLayer(Module):
    """A layer that can be fused with the layers after it."""

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """Run the first of `layers`, this one, and those fused with it; return (result, number of layers run)."""
        raise NotImplementedError
