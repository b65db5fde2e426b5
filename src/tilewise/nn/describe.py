"""A model as text: each layer by one name, such as `Conv2d(64→64, 3×3)`, and all of them as a tree with parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.nn.module import Module


def label(module: Module) -> str:
    """The layer's class and the sizes that matter, as every table and picture names it.

    >>> from tilewise import nn
    >>> label(nn.Conv2d(64, 128, 3, stride=2, padding=1))
    'Conv2d(64→128, 3×3, stride 2, padding 1)'
    """
    sizes = ", ".join(_sizes(module))
    return f"{type(module).__name__}({sizes})" if sizes else type(module).__name__


def layer_names(model: Module) -> dict[str, str]:
    """Dotted name to the name with its label: ``7`` to ``7 Conv2d(64→64, 3×3)``."""
    return {name: f"{name} {label(module)}" for name, module in model.named_modules() if name}


def tree(module: Module) -> str:
    """The module and all inside it, a line each, with the shapes and the number of its own parameters."""
    rows = [("", label(module), _own(module))]
    _add_children(module, "", rows)
    width = max(len(lead) + len(name) for lead, name, _ in rows)
    lines = [f"{lead}{name}{' ' * (width - len(lead) - len(name))}  {own}".rstrip() for lead, name, own in rows]
    total = sum(parameter.size for parameter in module.parameters())
    return "\n".join([*lines, f"{total:,} parameters"])


def _add_children(module: Module, lead: str, rows: list[tuple[str, str, str]]) -> None:
    children = list(module.named_children())
    for name, child in children:
        last = child is children[-1][1]
        rows.append((f"{lead}{'└─' if last else '├─'} ", f"{name} {label(child)}", _own(child)))
        _add_children(child, f"{lead}{'   ' if last else '│  '}", rows)


def _own(module: Module) -> str:
    """The module's own parameters: shapes, and how many numbers they are."""
    from tilewise.nn.module import Parameter

    own = {name: value for name, value in vars(module).items() if isinstance(value, Parameter)}
    if not own:
        return ""
    shapes = ", ".join(f"{name} {'×'.join(map(str, value.shape)) or '1'}" for name, value in own.items())
    return f"{shapes}: {sum(value.size for value in own.values()):,}"


def _sizes(module: Any) -> list[str]:
    found = []
    for into, out in (("in_channels", "out_channels"), ("in_features", "out_features")):
        if hasattr(module, into) and hasattr(module, out):
            found.append(f"{getattr(module, into)}→{getattr(module, out)}")
    if hasattr(module, "num_embeddings"):
        found.append(f"{module.num_embeddings}→{module.embedding_dim}")
    if hasattr(module, "num_features"):
        found.append(str(module.num_features))
    if hasattr(module, "normalized_shape"):
        found.append("×".join(map(str, module.normalized_shape)))
    if hasattr(module, "kernel_size"):
        found.append("×".join(map(str, module.kernel_size)))
        found += _unusual(module)
    if hasattr(module, "p"):
        found.append(f"{module.p:g}")
    return found


def _unusual(module: Any) -> list[str]:
    """Stride, padding and groups where they are not what one expects of a layer."""
    pools = not hasattr(module, "in_channels")
    usual = {"stride": module.kernel_size if pools else (1, 1), "padding": (0, 0)}
    found = [f"{name} {_short(getattr(module, name))}" for name in usual if getattr(module, name) != usual[name]]
    groups = getattr(module, "groups", 1)
    return [*found, f"groups {groups}"] if groups != 1 else found


def _short(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else "×".join(map(str, pair))
