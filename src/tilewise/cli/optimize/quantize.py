"""`tilewise quantize`: quantize a model to int8, and compare accuracy, size and latency."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from tilewise.cli.every import AsJson, Threads, argument, one_of, option, output_file_or_folder
from tilewise.cli.pictures import can_draw
from tilewise.cli.tables import show, table


def quantize(
    model: Annotated[str, argument("cnn, mlp, or an ONNX file of a network for the same images.")] = "cnn",
    data: Annotated[str | None, option("A folder with the MNIST files instead of the digits.")] = None,
    weights: Annotated[Path | None, option("A model written by `tilewise fit`.")] = None,
    observer: Annotated[str, one_of("minmax", "percentile", "mse", "entropy")] = "minmax",
    samples: Annotated[int, option("Training images to calibrate on.", min=1)] = 256,
    accuracy_drop: Annotated[
        float | None, option("Keep layers in float until at most this share of the accuracy is lost, such as 0.005.")
    ] = None,
    max_error: Annotated[
        float,
        option(
            "Use int16 activations until results are off by at most this share; 0 keeps all of them in uint8.", min=0
        ),
    ] = 0.01,
    batch: Annotated[int, option("Images per timed call.", min=1)] = 64,
    runs: Annotated[int, option("Timed calls of each model.", min=12)] = 50,
    calibration: Annotated[
        list[str] | None, option("Inputs of your own ONNX network: a .npy or .npz file with many of them.")
    ] = None,
    out: Annotated[
        Path,
        output_file_or_folder(help="Folder for the int8 model and the picture; for your own network a .onnx file."),
    ] = Path("out/quantize"),
    threads: Threads = None,
    seed: Annotated[int, option("Seed of the bootstrap interval.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Quantize a trained model to int8 and compare accuracy, size, latency and the error of every layer.

    Example: tilewise quantize cnn --observer mse
    """
    from tilewise import save
    from tilewise.cli.optimize.before_after import accuracy, load_image_task, outcomes, print_table
    from tilewise.cli.optimize.own_network import float_bytes
    from tilewise.nn.describe import layer_names
    from tilewise.quantize import quantize as run
    from tilewise.quantize import save_quantized
    from tilewise.quantize.graph import trace

    if calibration:
        from tilewise.cli.optimize.own_network import load_own_network, quantize_own

        options: dict[str, Any] = {"observer": observer, "max_error": max_error or None}
        quantize_own(load_own_network(model, calibration), options, out, runs, as_json)
        return
    task = load_image_task(model, data, weights)
    batches = [task.data.x_train[:samples][i : i + 64] for i in range(0, min(samples, len(task.data.x_train)), 64)]
    options = {"observer": observer, "max_error": max_error or None}
    if accuracy_drop is not None:
        options |= {"accuracy_drop": accuracy_drop, "evaluate": lambda candidate: accuracy(candidate, task.data)}
    int8: Any = run(task.model, batches, **options, progress=sys.stderr.isatty() and not as_json)
    out.mkdir(parents=True, exist_ok=True)
    on_disk = {"float32": out / f"{task.name}-float32.safetensors", "int8": out / f"{task.name}-int8.safetensors"}
    save(task.model.state_dict(), on_disk["float32"])
    save_quantized(int8, on_disk["int8"])
    sizes = {form: path.stat().st_size for form, path in on_disk.items()}
    rows = outcomes(
        task, {"float32": (task.model, float_bytes(task.model)), "int8": (int8, int8.nbytes)}, batch, runs, seed
    )
    layers = int8.report(task.data.x_test[:64], trace(task.model, task.data.x_test[:1]))
    _draw(int8.calibration, {"input": "input"} | {step.name: f"{step.name} ({step.kind})" for step in layers}, out)
    if as_json:
        facts = {"models": [r.as_dict() for r in rows], "bytes_on_disk": sizes, "layers": [vars(s) for s in layers]}
        facts |= {"measured_error": int8.measured_error, "stated_error": int8.stated_error}
        print(json.dumps(facts, default=float))
        return
    print_table(f"{task.name} in int8", rows, f"{batch} images")
    _print_layers(layers, layer_names(task.model))
    before, after = (sizes[form] / 1024 for form in ("float32", "int8"))
    if int8.stated_error is not None:
        print(
            f"Off by {int8.measured_error:.2%} of the largest result on held-out images; "
            f"at most {int8.stated_error:.2%} expected on other images"
        )
    print(f"On disk: {before:,.1f} KiB in float32, {after:,.1f} KiB in int8 ({after / before:.3f}×)")
    where = f"; ranges drawn in {out / 'ranges.png'}" if can_draw() else ""
    print(f"Saved as {on_disk['int8']}{where}")


def _print_layers(layers: list[Any], names: dict[str, str]) -> None:
    """Print a table of the quantized steps; `names` maps a step's name to the one to print."""
    words, numbers = ("step", "kind", "form", "on AVX2", "why float"), ("bytes", "signal to noise")
    rows = []
    for step in layers:
        size, ratio = f"{step.nbytes:,}" if step.nbytes else "", "" if step.snr_db is None else f"{step.snr_db:.1f} dB"
        rows.append((names.get(step.name, step.name), step.kind, step.form, size, ratio, step.avx2, step.reason))
    show(table((*words[:3], *numbers, *words[3:]), rows, "How each step was quantized", left_aligned=words))


def _draw(calibration: Any, labels: dict[str, str], out: Path) -> None:
    """Draw a bar per op that has its own range, from the smallest to the largest value, labelled with the scale."""
    from tilewise.cli.pictures import BLUE, GREY, picture

    range_preserving = ("(max_pool)", "(avg_pool)", "(flatten)")  # these ops keep the range of their input
    ops = zip(calibration.names, calibration.parameters, calibration.ranges, strict=True)
    bars = [(labels[name], p.scale, r) for name, p, r in ops if not labels[name].endswith(range_preserving)]
    with picture(out / "ranges.png", 8, 0.4 * len(bars) + 1.5) as axes:
        for row, (_, scale, (low, high)) in enumerate(bars):
            axes.plot([low, high], [row, row], color=BLUE, linewidth=6, solid_capstyle="butt")
            where: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"step {scale:.3g}", (max(high, 0), row), fontsize=8, color=GREY, **where)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axes.invert_yaxis()
        axes.margins(x=0.14)
        title = f"Range of each step's result ({calibration.observer}, {calibration.samples} images)"
        axes.set(xlabel="value", title=title)
        axes.grid(axis="x")
