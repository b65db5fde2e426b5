"""`tilewise run`: run a network from an ONNX file or the zoo, in float or INT8, and time it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import AsJson, Threads, answer, argument, option, output_file
from tilewise.cli.optimize.own_network import InputFiles, InputShapes, network_inputs

if TYPE_CHECKING:
    from tilewise.onnx import Network


def run(
    model: Annotated[str, argument("An ONNX file, or a network of the zoo by name, such as resnet18.")],
    batch: Annotated[int | None, option("Batch size (default: the file's, or 1).", min=1)] = None,
    shapes: InputShapes = None,
    files: InputFiles = None,
    size: Annotated[
        int | None, option("Other dimensions that the file leaves open (default: 224 pixels, else 8).", min=1)
    ] = None,
    int8: Annotated[bool, option("Quantize first, calibrating on the input.")] = False,
    runs: Annotated[int, option("Timed calls.", min=1)] = 20,
    out: Annotated[Path | None, output_file(help="Write the results to this .npz file.")] = None,
    save: Annotated[Path | None, output_file(help="Write the network, as it ran, to this ONNX file.")] = None,
    threads: Threads = None,
    seed: Annotated[int, option("Seed of the random input.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a network and show its outputs and the time of a pass.

    Example: tilewise run resnet18.onnx --shape x=8x3x224x224 --int8
    """
    from tilewise import Tensor, no_grad, onnx
    from tilewise.profile import Timer

    network = _network(model, seed)
    inputs = network_inputs(network, shapes, files, batch=batch, seed=seed, free=size or 8, pixels=size)
    with no_grad():
        timer, plan_or_network = Timer(time_limit=20.0), _compile_plan(network, inputs)
        written, fastest = network, plan_or_network
        timing = timer.measure(lambda: plan_or_network(*inputs), warmup=2, runs=max(runs, 1))
        if int8:
            quantized, exact = _quantize_network(network, inputs), _results_by_name(network, network(*inputs))
            integers = _compile_plan(quantized, inputs) if not hasattr(quantized, "report") else quantized
            cost = _cost_of_int8(quantized, inputs, exact, _results_by_name(network, integers(*map(Tensor, inputs))))
            int8_timing = timer.measure(lambda: integers(*inputs), warmup=2, runs=max(runs, 1))
            cost |= {"p50_s": int8_timing.p50, "float_p50_s": timing.p50}
            cost["kept_float"] = _reason_for_float(cost)
            if not cost["kept_float"]:
                written, fastest, timing = quantized, integers, int8_timing
        results = _results_by_name(network, fastest(*map(Tensor, inputs)))
    facts: dict[str, Any] = {
        "model": model,
        "opset": network.opset,
        "inputs": {port.name: list(x.shape) for port, x in zip(network.inputs, inputs, strict=True)},
        "outputs": {name: _summary(value) for name, value in results.items()},
        "p50_s": timing.p50,
    }
    if int8:
        facts["int8"] = cost
    if out is not None:
        _write_results(results, out)
    if save is not None:
        onnx.save(written, save)
    answer(as_json, facts, *_lines(facts))
    for path in (out, save):
        if path is not None:
            typer.echo(f"Saved as {path}", err=True)


def _network(name: str, seed: int) -> Network:
    """Load a network from a file, or by a zoo name: that one is exported to ONNX and loaded from there."""
    import tempfile

    from tilewise import onnx
    from tilewise.errors import ConfigurationError, did_you_mean

    if name.endswith(".onnx"):
        return onnx.load(name)
    from tilewise.models.zoo import ZOO

    if name not in ZOO:
        if not Path(name).exists():
            hint = did_you_mean(name, ZOO)
            raise ConfigurationError(f"{name!r} is neither an ONNX file nor a network of the zoo; {hint}")
        return onnx.load(name)
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        path = Path(folder) / f"{name}.onnx"
        onnx.save(ZOO[name](seed=seed), path)
        return onnx.load(path)


def _results_by_name(network: Network, result: Any) -> dict[str, Any]:
    """Return the results as a dictionary with the names of the outputs."""
    return result if isinstance(result, dict) else {network.outputs[0].name: result}


def _compile_plan(network: Network, inputs: list[Any]) -> Any:
    """Compile the network into a plan; return the network itself if it cannot be planned."""
    from tilewise import plan
    from tilewise.errors import ConfigurationError

    if not inputs or len(network.outputs) != 1:
        return network
    try:
        return plan.compile(network, *inputs)
    except ConfigurationError:
        return network


def _quantize_network(network: Network, inputs: list[Any]) -> Any:
    """Quantize a network: statically if it has one float input, else dynamically, which needs one output."""
    from tilewise.errors import ConfigurationError
    from tilewise.quantize import quantize, quantize_dynamic

    if len(inputs) == 1 and inputs[0].dtype.kind == "f":
        return quantize(network, inputs)
    if len(network.outputs) != 1:
        raise ConfigurationError("--int8 takes networks with one output")
    return quantize_dynamic(network)


def _summary(value: Any) -> dict[str, Any]:
    """Return shape and dtype of a result, and its range if it is floating point."""
    array = value.data
    real = array.dtype.kind == "f" and array.size
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        **(
            {"smallest": float(array.min()), "largest": float(array.max()), "mean": float(array.mean())} if real else {}
        ),
    }


def _reason_for_float(cost: dict[str, Any], max_error: float = 0.01) -> str:
    """Say why the float network is used instead of the INT8 one; "" if INT8 is used.

    `max_error` is a share of the largest result, the default of quantize().
    """
    if cost["error_of_largest"] > max_error:
        return f"off by more than {max_error:.0%}: kept float"
    return "slower than float: kept float" if cost["p50_s"] > cost["float_p50_s"] else ""


def _cost_of_int8(model: Any, inputs: list[Any], exact: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the largest error against the float network and the number of layers that run in INT8."""
    import numpy as np

    from tilewise.quantize.model import dynamic_layer_counts

    worst = 0.0
    for name, want in exact.items():
        scale = float(np.abs(want.data).max()) or 1.0
        worst = max(worst, float(np.abs(results[name].data - want.data).max()) / scale)
    counts = model.layer_counts() if hasattr(model, "layer_counts") else dynamic_layer_counts(model, *inputs)
    stated = getattr(model, "stated_error", None)
    return {"error_of_largest": worst, "stated_error": stated, "layers_in_int8": counts[0], "layers": counts[1]}


def _write_results(results: dict[str, Any], path: Path) -> None:
    """Write the network's results to an npz file, one array per output name."""
    import numpy as np

    from tilewise._atomic import atomic_writer

    with atomic_writer(path) as stream:
        np.savez(stream, **{name: value.data for name, value in results.items()})


def _lines(facts: dict[str, Any]) -> list[str]:
    """Format the facts about a run as lines of text for the terminal."""
    lines = [f"{facts['model']} (version {facts['opset']} of the operations)"]
    lines += [f"  in   {name} {tuple(shape)}" for name, shape in facts["inputs"].items()]
    for name, value in facts["outputs"].items():
        value_range = f", {value['smallest']:.4g} to {value['largest']:.4g}" if "largest" in value else ""
        lines.append(f"  out  {name} {tuple(value['shape'])} {value['dtype']}{value_range}")
    if "int8" in facts:
        cost = facts["int8"]
        lines.append(
            f"  {cost['layers_in_int8']} of {cost['layers']} convolutions, linear and recurrent layers in INT8; "
            f"off by {cost['error_of_largest']:.2%} of the largest result"
            + (f", at most {cost['stated_error']:.2%} expected on other inputs" if cost["stated_error"] else "")
        )
        times = f"INT8 {cost['p50_s'] * 1e3:.3f} ms, float {cost['float_p50_s'] * 1e3:.3f} ms"
        lines.append(f"  {cost['kept_float']} ({times})" if cost["kept_float"] else f"  {times}")
    return [*lines, f"  one pass takes {facts['p50_s'] * 1e3:.3f} ms"]
