"""`tilewise run`: a network in an ONNX file or of the zoo, in float or in INT8, with its results and its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import AsJson, Threads

if TYPE_CHECKING:
    from tilewise.onnx import Network


def run(
    model: Annotated[str, typer.Argument(help="An ONNX file, or a network of the zoo by name, such as resnet18.")],
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the random input.")] = 1,
    data: Annotated[Path | None, typer.Option("--input", help="A .npy file with the input, instead of random.")] = None,
    size: Annotated[int, typer.Option(min=1, help="Value of every other dimension that the file leaves open.")] = 8,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize first, calibrating on the input.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Timed calls.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the results to this .npz file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the network, as it ran, to this ONNX file.")] = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the random input.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a network and show its outputs and the time of a pass.

    Example: tilewise run resnet18.onnx --batch 8 --int8
    """
    from tilewise import Tensor, no_grad, onnx
    from tilewise.cli.every import check_output
    from tilewise.profile import Timer

    for path, label in ((out, "--out"), (save, "--save")):
        if path is not None:
            check_output(path, label)
    network = _network(model, seed)
    inputs = _inputs(network, data, batch, seed, size)
    with no_grad():
        quantized = _quantized(network, inputs) if int8 else network
        fastest = quantized if int8 else _planned(network, inputs)
        results = _named(network, fastest(*map(Tensor, inputs)))
        timing = Timer(time_limit=20.0).measure(lambda: fastest(*inputs), warmup=2, runs=max(runs, 1))
    facts: dict[str, Any] = {
        "model": model,
        "opset": network.opset,
        "inputs": {port.name: list(x.shape) for port, x in zip(network.inputs, inputs, strict=True)},
        "outputs": {name: _summary(value) for name, value in results.items()},
        "p50_s": timing.p50,
    }
    if int8:
        with no_grad():
            facts["int8"] = _cost_of_int8(quantized, _named(network, network(*inputs)), results)
    if out is not None:
        _write(results, out)
    if save is not None:
        onnx.save(quantized, save)
    typer.echo(json.dumps(facts) if as_json else "\n".join(_lines(facts)))
    for path in (out, save):
        if path is not None:
            typer.echo(f"Saved as {path}", err=True)


def _network(name: str, seed: int) -> Network:
    """The network of a file; one of the zoo is written to a file and read from there."""
    import tempfile

    from tilewise import onnx
    from tilewise.errors import ConfigurationError, did_you_mean
    from tilewise.models.zoo import ZOO

    if name in ZOO:
        with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
            path = Path(folder) / f"{name}.onnx"
            onnx.save(ZOO[name](seed=seed), path)
            return onnx.load(path)
    if not name.endswith(".onnx") and not Path(name).exists():
        hint = did_you_mean(name, ZOO)
        raise ConfigurationError(f"{name!r} is neither an ONNX file nor a network of the zoo; {hint}")
    return onnx.load(name)


def _inputs(network: Network, data: Path | None, batch: int, seed: int, size: int) -> list[Any]:
    if data is None:
        return network.example(batch, seed, free=size)
    from tilewise.costmodel.data.npz import read_npy
    from tilewise.errors import ConfigurationError

    if len(network.inputs) != 1:
        raise ConfigurationError(f"{network.title} takes {len(network.inputs)} inputs, and --input is one")
    return [read_npy(data, 1 << 33)]


def _named(network: Network, result: Any) -> dict[str, Any]:
    """The results by the names of the outputs."""
    return result if isinstance(result, dict) else {network.outputs[0].name: result}


def _planned(network: Network, inputs: list[Any]) -> Any:
    """The network as a plan, one native call where its operations allow it; as it is where they do not."""
    from tilewise import plan
    from tilewise.errors import ConfigurationError

    if not inputs or len(network.outputs) != 1:
        return network
    try:
        return plan.compile(network, *inputs)
    except ConfigurationError:
        return network


def _quantized(network: Network, inputs: list[Any]) -> Any:
    from tilewise.errors import ConfigurationError
    from tilewise.quantize import quantize, quantize_dynamic

    if len(inputs) == 1 and inputs[0].dtype.kind == "f":
        return quantize(network, inputs)
    if len(network.outputs) != 1:
        raise ConfigurationError("--int8 takes networks with one output")
    return quantize_dynamic(network)


def _summary(value: Any) -> dict[str, Any]:
    array = value.data
    real = array.dtype.kind == "f" and array.size
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        **(
            {"smallest": float(array.min()), "largest": float(array.max()), "mean": float(array.mean())} if real else {}
        ),
    }


def _cost_of_int8(model: Any, exact: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """How far the results are from the float network's, and how many steps run in integers."""
    import numpy as np

    worst = 0.0
    for name, want in exact.items():
        scale = float(np.abs(want.data).max()) or 1.0
        worst = max(worst, float(np.abs(results[name].data - want.data).max()) / scale)
    steps = [s for s in model.report() if s.kind in ("conv", "linear")] if hasattr(model, "report") else []
    layers = [m for m in model.modules() if getattr(m, "computes_in_int8", False)]
    integers = sum(s.form != "float32" for s in steps) if steps else len(layers)
    return {"error_of_largest": worst, "layers_in_int8": integers, "layers": len(steps) or integers}


def _write(results: dict[str, Any], path: Path) -> None:
    import numpy as np

    from tilewise._files import atomic_writer

    with atomic_writer(path) as stream:
        np.savez(stream, **{name: value.data for name, value in results.items()})


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['model']} (version {facts['opset']} of the operations)"]
    lines += [f"  in   {name} {tuple(shape)}" for name, shape in facts["inputs"].items()]
    for name, value in facts["outputs"].items():
        spread = f", {value['smallest']:.4g} to {value['largest']:.4g}" if "largest" in value else ""
        lines.append(f"  out  {name} {tuple(value['shape'])} {value['dtype']}{spread}")
    if "int8" in facts:
        cost = facts["int8"]
        lines.append(
            f"  {cost['layers_in_int8']} of {cost['layers']} convolutions and linear layers in INT8; "
            f"off by {cost['error_of_largest']:.2%} of the largest result"
        )
    return [*lines, f"  one pass takes {facts['p50_s'] * 1e3:.3f} ms"]
