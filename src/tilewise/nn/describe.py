"""Describe models as text: a label per layer, such as `Conv2d(64→64, 3×3)`, and a tree with parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.nn.module import Module


def label(module: Module) -> str:
    """Format a layer's class and main sizes, as used in all tables and figures.

    >>> from tilewise import nn
    >>> label(nn.Conv2d(64, 128, 3, stride=2, padding=1))
    'Conv2d(64→128, 3×3, stride 2, padding 1)'
    """
    sizes = ", ".join(_sizes(module))
    return f"{type(module).__name__}({sizes})" if sizes else type(module).__name__


def layer_names(model: Module) -> dict[str, str]:
    """Map the dotted names of all layers to names with labels: ``7`` to ``7 Conv2d(64→64, 3×3)``."""
    return {name: f"{name} {label(module)}" for name, module in model.named_modules() if name}


def tree(module: Module) -> str:
    """Format a module and all modules inside it, one per line, with the shapes and number of their parameters."""
    rows = [("", label(module), _own_parameters(module))]
    _add_children(module, "", rows)
    width = max(len(lead) + len(name) for lead, name, _ in rows)
    lines = [f"{lead}{name}{' ' * (width - len(lead) - len(name))}  {own}".rstrip() for lead, name, own in rows]
    total = sum(parameter.size for parameter in module.parameters())
    return "\n".join([*lines, f"{total:,} parameters"])


def _add_children(module: Module, lead: str, rows: list[tuple[str, str, str]]) -> None:
    """Append a row (tree drawing and name, parameters, ...) per descendant to `rows`, depth first."""
    children = list(module.named_children())
    for name, child in children:
        last = child is children[-1][1]
        rows.append((f"{lead}{'└─' if last else '├─'} ", f"{name} {label(child)}", _own_parameters(child)))
        _add_children(child, f"{lead}{'   ' if last else '│  '}", rows)


def _own_parameters(module: Module) -> str:
    """Format shapes and count of a module's own parameters, without those of submodules."""
    from tilewise.nn.module import Parameter

    own = {name: value for name, value in vars(module).items() if isinstance(value, Parameter)}
    if not own:
        return ""
    shapes = ", ".join(f"{name} {'×'.join(map(str, value.shape)) or '1'}" for name, value in own.items())
    return f"{shapes}: {sum(value.size for value in own.values()):,}"


def _sizes(module: Any) -> list[str]:
    """Return the sizes for a layer's label, from whichever attributes it has."""
    sizes = []
    for inputs, outputs in (("in_channels", "out_channels"), ("in_features", "out_features")):
        if hasattr(module, inputs) and hasattr(module, outputs):
            sizes.append(f"{getattr(module, inputs)}→{getattr(module, outputs)}")
    if hasattr(module, "num_embeddings"):
        sizes.append(f"{module.num_embeddings}→{module.embedding_dim}")
    if hasattr(module, "num_features"):
        sizes.append(str(module.num_features))
    if hasattr(module, "normalized_shape"):
        sizes.append("×".join(map(str, module.normalized_shape)))
    if hasattr(module, "kernel_size"):
        sizes.append("×".join(map(str, module.kernel_size)))
        sizes += _non_default_geometry(module)
    if hasattr(module, "p"):
        sizes.append(f"{module.p:g}")
    return sizes


def _non_default_geometry(module: Any) -> list[str]:
    """Return stride, padding and groups for a layer's label if they differ from the defaults."""
    is_pooling = not hasattr(module, "in_channels")
    defaults = {"stride": module.kernel_size if is_pooling else (1, 1), "padding": (0, 0)}
    values = [f"{name} {_short(getattr(module, name))}" for name in defaults if getattr(module, name) != defaults[name]]
    groups = getattr(module, "groups", 1)
    return [*values, f"groups {groups}"] if groups != 1 else values


def _short(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else "×".join(map(str, pair))
