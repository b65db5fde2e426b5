"""`tilewise prune`: remove weights or filters of a model, and compare accuracy, size and latency."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.every import AsJson, one_of, output_folder
from tilewise.errors import ConfigurationError


def prune(
    model: Annotated[str, typer.Argument(help="cnn, mlp, or an ONNX file of a network for the same images.")] = "cnn",
    sparsity: Annotated[float, typer.Option(help="Share of weights (or filters) to remove.")] = 0.7,
    structured: Annotated[bool, typer.Option("--structured", help="Remove whole filters instead of weights.")] = False,
    scope: Annotated[str, one_of("global", "layer")] = "global",
    pattern: Annotated[str, typer.Option(help="unstructured, N:M such as 2:4, or block:HxW.")] = "unstructured",
    epochs: Annotated[int, typer.Option(min=0, help="Epochs of fine-tuning after pruning.")] = 0,
    data: Annotated[str | None, typer.Option(help="A folder with the MNIST files instead of the digits.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A model written by `tilewise fit`.")] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also prune each layer by itself and say which ones should be left alone.")
    ] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Also quantize the model, before and after pruning.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per timed call.")] = 64,
    runs: Annotated[int, typer.Option(min=12, help="Timed calls of each model.")] = 50,
    out: Annotated[Path, output_folder(help="Folder for the pruned model and the picture.")] = Path("out/prune"),
    seed: Annotated[int, typer.Option(help="Seed of the fine-tuning and the interval.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Prune a trained model and compare accuracy, size and latency; `--scan` shows which layers suffer.

    Example: tilewise prune cnn --sparsity 0.7 --epochs 2
    """
    from tilewise.cli.optimize.before_after import accuracy, float_bytes, image_task, outcomes, print_table
    from tilewise.io import save
    from tilewise.nn.describe import layer_names
    from tilewise.prune import prune as run
    from tilewise.prune import sensitivity, shrink, sparsify

    task = image_task(model, data, weights)
    if structured:
        smaller: Any = shrink(task.model, sparsity)
        if sparsity and float_bytes(smaller) == float_bytes(task.model):
            raise ConfigurationError(f"{task.name} has no filters that could be removed; leave --structured out")
        layers: list[Any] = []
    else:
        smaller = run(task.model, sparsity, scope, pattern=pattern)
        layers = smaller.pruning.layers
    if epochs:
        fine_tune(smaller, task.data, epochs, seed)
    smaller.eval()
    out.mkdir(parents=True, exist_ok=True)
    save(smaller, out / f"{task.name}-pruned.safetensors")
    fast = smaller if structured else sparsify(smaller, sample=task.data.x_test[:batch])
    candidates = {"dense": (task.model, float_bytes(task.model)), "pruned": (fast, _bytes(fast))}
    if int8:
        candidates |= _quantized(task, smaller, out / task.name)
    rows = outcomes(task, candidates, batch, runs, seed)
    names = layer_names(task.model)
    notes = _choices(fast, names) + (_int8_notes(rows, out / task.name) if int8 else [])
    sensitivities = sensitivity(task.model, lambda m: accuracy(m, task.data)) if scan else []
    if sensitivities:
        _draw(sensitivities, out / "sensitivity.png")
    if as_json:
        facts: dict[str, Any] = {"models": [r.as_dict() for r in rows], "layers": [vars(layer) for layer in layers]}
        facts |= {"sensitivity": [vars(s) for s in sensitivities], "notes": notes}
        print(json.dumps(facts, default=float))
        return
    print_table(f"{task.name}, {sparsity:.0%} of its {'filters' if structured else 'weights'} removed", rows, batch)
    for layer in layers:
        layer_name = names.get(layer.name.removesuffix(".weight"), layer.name)
        print(f"  {layer_name}: {layer.zeros:,} of {layer.weights:,} weights are zero ({layer.sparsity:.1%})")
    for note in notes:
        print(f"  {note}")
    for entry in sensitivities:
        layer_name = names.get(entry.name.removesuffix(".weight"), entry.name)
        curve = ", ".join(f"{level:.0%}: {100 * value:.1f} %" for level, value in entry.accuracy.items())
        print(f"  {layer_name} alone: {curve}{'  <- leave this one alone' if entry.fragile else ''}")


def _bytes(model: Any) -> int:
    from tilewise.cli.optimize.before_after import float_bytes
    from tilewise.prune import SparseConv2d, SparseLinear

    return float_bytes(model) + sum(m.nbytes for m in model.modules() if isinstance(m, SparseLinear | SparseConv2d))


def _choices(model: Any, names: Mapping[str, str]) -> list[str]:
    """Describe the kernel of each pruned layer and the times that decided it."""
    return [f"{names.get(name, name)} runs {why}" for name, why in getattr(model, "sparse_report", {}).items()]


def _quantized(task: Any, pruned: Any, stem: Path) -> dict[str, tuple[Any, int]]:
    """Quantize the dense and the pruned model, save both, and return them with their sizes in bytes."""
    import numpy as np

    from tilewise.prune import save_pruned
    from tilewise.quantize import quantize, save_quantized

    batches = np.array_split(task.data.x_train[:256], 4)
    plain: Any = quantize(task.model, batches)
    small: Any = quantize(pruned, batches)
    save_quantized(plain, f"{stem}-int8.safetensors")
    save_pruned(small, f"{stem}-pruned-int8.safetensors")
    return {"int8": (plain, int(plain.nbytes)), "pruned + int8": (small, int(small.nbytes))}


def _int8_notes(rows: list[Any], stem: Path) -> list[str]:
    """Describe the sizes of the int8 files and the speed-up of pruning on top of int8."""
    by_name = {row.name: row for row in rows}
    before = by_name["dense"].bytes_in_memory
    files = {name: Path(f"{stem}-{name}.safetensors").stat().st_size for name in ("int8", "pruned-int8")}
    sizes = ", ".join(f"{name} {size / 1024:.1f} KiB ({size / before:.3f}×)" for name, size in files.items())
    gain = by_name["int8"].latency_s / by_name["pruned + int8"].latency_s
    return [
        f"files beside {before / 1024:.1f} KiB of float32: {sizes}",
        f"pruning saves int8 bytes, not time: its convolutions multiply the zeros too ({gain:.2f}× int8 alone)",
    ]


def fine_tune(model: Any, images: Any, epochs: int, seed: int) -> None:
    """Train further; weights that were pruned stay zero."""
    import numpy as np

    from tilewise import Tensor, optim
    from tilewise.nn import functional as F

    if epochs > 1000:
        raise ConfigurationError(f"{epochs} epochs of fine-tuning are more than anyone waits for")
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    if hasattr(model, "pruning"):
        model.pruning.hold(optimizer)
    rng, x, y = np.random.default_rng(seed), images.x_train, images.y_train
    model.train()
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x), 64):
            rows = order[start : start + 64]
            optimizer.zero_grad()
            F.cross_entropy(model(Tensor(x[rows])), y[rows]).backward()
            optimizer.step()


def _draw(sensitivities: list[Any], path: Path) -> None:
    """Draw accuracy against sparsity, one line per layer."""
    from tilewise.cli.pictures import picture

    with picture(path, 8, 4.5) as axes:
        for entry in sensitivities:
            levels, accuracies = ([100 * value for value in pair] for pair in zip(*entry.accuracy.items(), strict=True))
            axes.plot(levels, accuracies, "--" if entry.fragile else "-", marker="o", label=entry.name)
        axes.set(xlabel="sparsity of this layer alone, %", ylabel="accuracy, %", title="When pruning fails")
        axes.grid()
        axes.legend(title="layer (dashed: leave alone)")
