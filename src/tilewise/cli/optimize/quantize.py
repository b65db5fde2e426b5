"""`tilewise quantize`: a model in int8, with what that cost and what it gained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.tables import show


def quantize(
    model: Annotated[str, typer.Argument(help="cnn, mlp, or an ONNX file of a network for the same images.")] = "cnn",
    data: Annotated[str | None, typer.Option(help="A folder with the MNIST files instead of the digits.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A model written by `tilewise fit`.")] = None,
    observer: Annotated[str, typer.Option(help="minmax, percentile, mse or entropy.")] = "minmax",
    samples: Annotated[int, typer.Option(min=1, help="Training images to calibrate on.")] = 256,
    accuracy_drop: Annotated[
        float | None,
        typer.Option(help="Keep layers in float until at most this share of the accuracy is lost, such as 0.005."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per timed call.")] = 64,
    runs: Annotated[int, typer.Option(min=12, help="Timed calls of each model.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder for the int8 model and the picture.")] = Path("out/quantize"),
    threads: Annotated[int | None, typer.Option(help="Threads of the native kernels.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the interval's bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quantize a trained model to int8 and compare accuracy, size, latency and the error of every layer.

    Example: tilewise quantize cnn --observer mse
    """
    from tilewise import save, set_num_threads
    from tilewise.cli.optimize.before_after import accuracy, float_bytes, image_task, outcomes, print_table
    from tilewise.nn.describe import layer_names
    from tilewise.quantize import calibrate, save_quantized
    from tilewise.quantize import quantize as run
    from tilewise.quantize.graph import trace

    if threads is not None:
        set_num_threads(threads)
    task = image_task(model, data, weights)
    batches = [task.data.x_train[:samples][i : i + 64] for i in range(0, min(samples, len(task.data.x_train)), 64)]
    calibration = calibrate(task.model, batches, observer, progress=sys.stderr.isatty() and not as_json)
    if accuracy_drop is None:
        int8: Any = run(task.model, calibration)
    else:
        judge = lambda candidate: accuracy(candidate, task.data)  # noqa: E731
        int8 = run(task.model, batches, observer=observer, accuracy_drop=accuracy_drop, evaluate=judge)
    out.mkdir(parents=True, exist_ok=True)
    on_disk = {"float32": out / f"{task.name}-float32.safetensors", "int8": out / f"{task.name}-int8.safetensors"}
    save(task.model.state_dict(), on_disk["float32"])
    save_quantized(int8, on_disk["int8"])
    sizes = {form: path.stat().st_size for form, path in on_disk.items()}
    rows = outcomes(
        task, {"float32": (task.model, float_bytes(task.model)), "int8": (int8, int8.nbytes)}, batch, runs, seed
    )
    layers = int8.report(task.data.x_test[:64], trace(task.model, task.data.x_test[:1]))
    _draw(calibration, {"input": "input"} | {step.name: f"{step.name} ({step.kind})" for step in layers}, out)
    if as_json:
        facts = {"models": [r.as_dict() for r in rows], "bytes_on_disk": sizes, "layers": [vars(s) for s in layers]}
        print(json.dumps(facts, default=float))
        return
    print_table(f"{task.name} in int8", rows, batch)
    _layers(layers, layer_names(task.model))
    before, after = (sizes[form] / 1024 for form in ("float32", "int8"))
    print(f"On disk: {before:,.1f} KiB in float32, {after:,.1f} KiB in int8 ({after / before:.3f}×)")
    print(f"Saved as {on_disk['int8']}; ranges drawn in {out / 'ranges.png'}")


def _layers(layers: list[Any], names: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(title="What became of each step", title_justify="left")
    for heading in ("step", "kind", "form", "bytes", "signal to noise", "on AVX2", "why float"):
        table.add_column(heading, justify="right" if heading in ("bytes", "signal to noise") else "left")
    for step in layers:
        ratio = "" if step.snr_db is None else f"{step.snr_db:.1f} dB"
        table.add_row(
            names.get(step.name, step.name),
            step.kind,
            step.form,
            f"{step.nbytes:,}" if step.nbytes else "",
            ratio,
            step.avx2,
            step.reason,
        )
    show(table)


def _draw(calibration: Any, labels: dict[str, str], out: Path) -> None:
    """A bar per step that sets a range of its own, from the smallest to the largest value, with the size of a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kept = ("(max_pool)", "(avg_pool)", "(flatten)")  # these keep the range of what they read
    steps = zip(calibration.names, calibration.parameters, calibration.ranges, strict=True)
    shown = [(labels[name], p.scale, r) for name, p, r in steps if not labels[name].endswith(kept)]
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(shown) + 1.5))
    for place, (_, scale, (low, high)) in enumerate(shown):
        axes.plot([low, high], [place, place], color="#2a6fb5", linewidth=6, solid_capstyle="butt")
        where: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"step {scale:.3g}", (max(high, 0), place), fontsize=8, color="#5a616b", **where)
    axes.axvline(0, color="#8a8f98", linewidth=1)
    axes.set_yticks(range(len(shown)), [label for label, _, _ in shown])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set(
        xlabel="value", title=f"Range of each step's result ({calibration.observer}, {calibration.samples} images)"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(out / "ranges.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
