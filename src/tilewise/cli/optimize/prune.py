"""`tilewise prune`: remove weights or filters of a model, fine-tune, and compare accuracy, size and latency."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilewise.cli.every import AsJson, argument, one_of, option, output_file_or_folder
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.cli.optimize.before_after import ModelVariant, Outcome
    from tilewise.cli.optimize.pruning_tasks import ImagePruning, TextPruning

_LEAST_SPARSITY = 0.4  # of layers whose sparse kernel is tried: with fewer zeros it is never faster
_TOLERABLE_LOSS = 2.0  # points of accuracy; the plan's success metric


def prune(
    model: Annotated[
        str, argument("cnn, mlp, resnet8, gpt, or an ONNX file of a network for the same images.")
    ] = "cnn",
    sparsity: Annotated[float, option("Share of weights (or filters) to remove.")] = 0.7,
    structured: Annotated[bool, option("Remove whole filters or hidden units instead of weights.")] = False,
    scope: Annotated[str, one_of("auto", "global", "layer", "row")] = "auto",
    pattern: Annotated[str, option("unstructured, N:M such as 2:4, or block:HxW.")] = "unstructured",
    epochs: Annotated[
        int | None, option("Epochs of fine-tuning.", min=0, show_default="20 (mlp 400, resnet8 40, gpt 5)")
    ] = None,
    finetune: Annotated[
        bool, option("Fine-tune while pruning, or show the accuracy without it.", "--finetune/--no-finetune")
    ] = True,
    data: Annotated[str | None, option("A folder with the MNIST files instead of the digits.")] = None,
    weights: Annotated[Path | None, option("A model written by `tilewise fit`.")] = None,
    scan: Annotated[bool, option("Also prune each layer by itself and list those that should stay dense.")] = False,
    int8: Annotated[bool, option("Also quantize the model, before and after pruning.")] = False,
    batch: Annotated[int, option("Images per timed call.", min=1)] = 64,
    runs: Annotated[int, option("Timed calls of each model.", min=12)] = 50,
    calibration: Annotated[
        list[str] | None, option("Inputs of your own ONNX network: a .npy or .npz file with many of them.")
    ] = None,
    out: Annotated[
        Path,
        output_file_or_folder(help="Folder for the pruned model and the picture; for your own network a .onnx file."),
    ] = Path("out/prune"),
    seed: Annotated[int, option("Seed of the fine-tuning and the interval.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Prune a trained model and compare accuracy, size and latency; `--scan` shows which layers suffer.

    Weights are removed gradually during a short fine-tuning; from another copy, as many are removed as whole filters or
    hidden units. The faster of the two is kept; where none is faster than the planned dense model, that stays.

    Example: tilewise prune gpt
    """
    from tilewise.cli.optimize.before_after import (
        ModelVariant,
        accuracy,
        bytes_with_kernels,
        compare,
        load_image_task,
        print_table,
    )
    from tilewise.cli.optimize.pruning_tasks import ImagePruning, TextPruning
    from tilewise.io import save
    from tilewise.nn.describe import layer_names
    from tilewise.prune import sensitivity, sparsify
    from tilewise.prune.masks import Pattern, checked_sparsity

    checked_sparsity(sparsity)
    Pattern(pattern)
    if calibration:
        from tilewise.cli.optimize.own_network import load_own_network, prune_own

        if structured or scan or int8 or epochs:
            raise ConfigurationError("filters, --scan, --int8 and fine-tuning need a model of ours and labelled images")
        own = load_own_network(model, calibration)
        prune_own(own, sparsity, scope, pattern, out=out, runs=runs, as_json=as_json)
        return
    if model == "gpt" and (structured or int8 or scan or data or weights):
        raise ConfigurationError("gpt is pruned with its shipped weights and text; leave the options for images out")
    task = TextPruning(seed) if model == "gpt" else ImagePruning(load_image_task(model, data, weights), batch, seed)
    epochs = 0 if not finetune else task.epochs if epochs is None else epochs
    if epochs > 1000:
        raise ConfigurationError(f"{epochs} epochs of fine-tuning would take too long; give fewer")
    versions: dict[str, Any] = {"dense": task.model}
    layers: list[Any] = []
    if not structured:
        zeros = _prune_weights(task, sparsity, scope, pattern, epochs)
        layers = zeros.pruning.layers
        versions["sparse"] = sparsify(zeros, _LEAST_SPARSITY, task.sample())
    if structured or (task.can_shrink and pattern == "unstructured"):
        versions[task.outputs_removed] = _remove_filters(task, sparsity, not structured, epochs)
    out.mkdir(parents=True, exist_ok=True)
    candidates = {
        name: ModelVariant(task.call(version), bytes_with_kernels(version), task.correct(version))
        for name, version in versions.items()
    }
    if int8:
        smaller = versions[task.outputs_removed] if structured else zeros
        candidates |= _quantized(task, smaller, out / task.name)
    rows = compare(candidates, runs, seed)
    names = layer_names(task.model)
    best, verdict = choose(rows[: len(versions)])
    save(zeros if best == "sparse" else versions[best], out / f"{task.name}-pruned.safetensors")
    # The kernel of each pruned layer, and the times that decided it.
    sparse_report = getattr(versions.get("sparse"), "sparse_report", {})
    notes = [verdict, *(f"{names.get(name, name)} runs {why}" for name, why in sparse_report.items())]
    notes += _int8_notes(rows, out / task.name) if int8 else []
    sensitivities = sensitivity(task.model, lambda m: accuracy(m, task.images)) if scan else []  # type: ignore[union-attr]
    if sensitivities:
        _draw(sensitivities, out / "sensitivity.png")
    if as_json:
        facts: dict[str, Any] = {"models": [r.as_dict() for r in rows], "layers": [vars(layer) for layer in layers]}
        facts |= {"sensitivity": [vars(s) for s in sensitivities], "notes": notes, "kept": best}
        print(json.dumps(facts, default=float))
        return
    how = f"{epochs} epochs of fine-tuning" if epochs else "no fine-tuning"
    print_table(f"{task.name}, {sparsity:.0%} of its weights removed, {how}", rows, task.timed_call)
    for layer in layers:
        layer_name = names.get(layer.name.removesuffix(".weight"), layer.name)
        print(f"  {layer_name}: {layer.zeros:,} of {layer.weights:,} weights are zero ({layer.sparsity:.1%})")
    for note in notes:
        print(f"  {note}")
    for entry in sensitivities:
        layer_name = names.get(entry.name.removesuffix(".weight"), entry.name)
        curve = ", ".join(f"{level:.0%}: {100 * value:.1f} %" for level, value in entry.accuracy.items())
        print(f"  {layer_name} alone: {curve}{'  <- leave this one alone' if entry.fragile else ''}")


def _prune_weights(task: ImagePruning | TextPruning, sparsity: float, scope: str, pattern: str, epochs: int) -> Any:
    """Prune single weights, gradually with fine-tuning or in one shot; the scope is chosen on validation data."""
    from tilewise.cli.optimize.own_network import pruned_candidates
    from tilewise.prune import prune_gradually

    # Without training, Wanda scores are candidates too.
    calibration = None if epochs else task.calibration()
    trials = pruned_candidates(task.model, sparsity, scope, pattern, calibration)
    options, pruned = max(trials, key=lambda trial: task.validate(trial[1])) if len(trials) > 1 else trials[0]
    if not epochs:
        return pruned
    steps = epochs * task.steps_per_epoch
    with _fine_tuning(steps) as progress:
        return prune_gradually(
            task.model, sparsity, task.loss, steps=steps, lr=task.lr, pattern=pattern, progress=progress, **options
        )


def _remove_filters(task: Any, sparsity: float, of_weights: bool, epochs: int) -> Any:
    """Remove filters or hidden units, as many as make up the share `sparsity` of them or of weights, and fine-tune."""
    from tilewise.cli.optimize.own_network import float_bytes
    from tilewise.prune import shrink

    # A layer that loses the share f of its inputs and outputs keeps (1 - f)² of its weights. The first layer keeps its
    # inputs and the last its outputs, so small networks must lose more of the others, up to a tenth of what stays.
    share, size = 1 - (1 - sparsity) ** 0.5 if of_weights else sparsity, float_bytes(task.model)
    smaller: Any = shrink(task.model, share)
    while of_weights and float_bytes(smaller) > 1.1 * (1 - sparsity) * size and share < 0.99:
        share += 0.01
        smaller = shrink(task.model, share)
    if sparsity and float_bytes(smaller) == size:
        raise ConfigurationError(f"{task.name} has no filters that could be removed; leave --structured out")
    if epochs:
        steps = epochs * task.steps_per_epoch
        with _fine_tuning(steps) as progress:
            fine_tune(smaller, task.loss, steps, task.lr, progress)
    return smaller.eval()


def fine_tune(model: Any, loss: Any, steps: int, lr: float, progress: Any = lambda *_: None) -> None:
    """Train further on `loss(model)`, with a learning rate that falls to zero; pruned weights stay zero."""
    from tilewise import optim

    optimizer = optim.AdamW(list(model.parameters()), lr=lr, weight_decay=0.0)
    if hasattr(model, "pruning"):
        model.pruning.hold(optimizer)
    model.train()
    for step in range(steps):
        optimizer.lr = lr * (1 - step / steps)
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        progress(step + 1, value.item())


def choose(rows: list[Outcome]) -> tuple[str, str]:
    """Choose the fastest version whose loss of accuracy is small; return its name and a sentence about it."""
    dense, *others = rows
    fine = [row for row in others if row.drop_interval[1] < _TOLERABLE_LOSS and row.speedup_interval[0] > 1]
    if not fine:
        accurate = [row for row in others if row.drop_interval[1] < _TOLERABLE_LOSS]
        loss = f"pruning loses {_TOLERABLE_LOSS:g} points or more"
        faster = any(row.speedup_interval[0] > 1 for row in others)
        neither = (
            f"the faster form loses {_TOLERABLE_LOSS:g} points or more" if faster else "no form is measurably faster"
        )
        why = f"{neither} here" if accurate else loss
        return dense.name, f"Kept dense: {why}."
    best = max(fine, key=lambda row: row.speedup)
    size = best.bytes_in_memory / dense.bytes_in_memory
    return best.name, f"Kept {best.name}: {best.speedup:.2f}× as fast as dense, {size:.2f}× the memory."


def _fine_tuning(steps: int) -> Any:
    """Return a context that yields a progress function: a bar on a terminal, ten lines in a log."""
    from contextlib import contextmanager

    from tilewise.cli.tables import progress_bar

    @contextmanager
    def progress() -> Any:
        """Yield a function that shows a fine-tuning step, as a bar on a terminal and as lines elsewhere."""
        with progress_bar(None) as move:

            def report(step: int, loss: float) -> None:
                """Show that a training step is done, with its loss."""
                if move is not None:
                    move(step, steps, f"fine-tuning, loss {loss:.3f}")
                elif step % max(1, steps // 10) == 0:
                    print(f"fine-tuning: step {step} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

            yield report

    return progress()


def _quantized(task: Any, pruned: Any, stem: Path) -> dict[str, ModelVariant]:
    """Quantize the dense and the pruned model, save both, and return them as candidates."""
    import numpy as np

    from tilewise.cli.optimize.before_after import ModelVariant
    from tilewise.prune import save_pruned
    from tilewise.quantize import quantize, save_quantized

    batches = np.array_split(task.images.x_train[:256], 4)
    plain: Any = quantize(task.model, batches)
    small: Any = quantize(pruned, batches)
    save_quantized(plain, f"{stem}-int8.safetensors")
    save_pruned(small, f"{stem}-pruned-int8.safetensors")
    versions = {"int8": plain, "pruned + int8": small}
    return {n: ModelVariant(partial(m, task.sample()), int(m.nbytes), task.correct(m)) for n, m in versions.items()}


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


def _draw(sensitivities: list[Any], path: Path) -> None:
    """Draw accuracy against sparsity into a picture, one line per layer."""
    from tilewise.cli.pictures import picture

    with picture(path, 8, 4.5) as axes:
        for entry in sensitivities:
            levels, accuracies = ([100 * value for value in pair] for pair in zip(*entry.accuracy.items(), strict=True))
            axes.plot(levels, accuracies, "--" if entry.fragile else "-", marker="o", label=entry.name)
        axes.set(xlabel="sparsity of this layer alone, %", ylabel="accuracy, %", title="When pruning fails")
        axes.grid()
        axes.legend(title="layer (dashed: leave alone)")
