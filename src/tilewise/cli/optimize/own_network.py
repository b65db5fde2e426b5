"""`quantize` and `prune` on somebody's own ONNX file: results and times are compared with the float network's.

Nobody knows the labels of somebody's data, so that the comparison is of results: the largest difference, as a share of
the largest result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tilewise.cli.every import option
from tilewise.errors import ConfigurationError, TilewiseError, did_you_mean
from tilewise.nn import Module
from tilewise.profile import Timer
from tilewise.tensor import Tensor, no_grad

if TYPE_CHECKING:
    from tilewise.onnx import Network

_OPEN_BATCH = 8  # inputs per call where the file leaves the batch open; arbitrary, bounds the memory of calibration
_SUFFIXES = (".onnx", ".safetensors")


def float_bytes(model: Module) -> int:
    return sum(t.size * t.dtype.itemsize for _, t in model.named_tensors())


@dataclass(frozen=True)
class OwnNetwork:
    """A network from a file, and batches of its input."""

    path: Path
    network: Network
    batches: list[Any]


def load_own_network(name: str, calibration: Iterable[str]) -> OwnNetwork:
    """Load an ONNX file with one input, and the batches that a .npy or .npz file has for it."""
    from tilewise import onnx

    if not name.endswith(".onnx"):
        raise ConfigurationError(f"--calibration belongs to an ONNX file, and {name} is not one")
    network = onnx.load(name)
    if len(network.inputs) != 1 or network.inputs[0].dtype.kind != "f" or len(network.outputs) != 1:
        raise ConfigurationError(f"this command takes networks with one float input and one output; {name} differs")
    data = input_arrays(network, calibration, "--calibration")[network.inputs[0].name]
    return OwnNetwork(Path(name), network, _batches(network, data))


def _batches(network: Network, data: Any) -> list[Any]:
    """Split an array of inputs into batches of the size that the file fixes."""
    shape = network.inputs[0].shape
    fixed = shape[0] if shape and isinstance(shape[0], int) else None
    size = fixed or _OPEN_BATCH
    batches = [data[i : i + size] for i in range(0, len(data), size)] if data.ndim else []
    if fixed is not None:
        batches = [batch for batch in batches if len(batch) == fixed]
    if not batches:
        raise ConfigurationError(f"{network.title} takes {size} inputs at a time; the calibration file has fewer")
    return batches


def output_path(out: Path, own: OwnNetwork, word: str) -> Path:
    """Return the file to write: `out` if it names one, else one in the folder `out`."""
    path = out if out.suffix in _SUFFIXES else out / f"{own.path.stem}-{word}.onnx"
    if path.exists() and own.path.exists() and path.samefile(own.path):
        raise ConfigurationError(f"--out {path} is the network itself; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def report(
    own: OwnNetwork, versions: dict[str, tuple[Module, int]], path: Path, runs: int, as_json: bool, note: str = ""
) -> None:
    """Print errors, sizes and times of versions of a network (e.g. int8) compared with the original."""
    x = Tensor(own.batches[0])
    forms = {"float32": (own.network, float_bytes(own.network)), **versions}

    def call(model: Module) -> Callable[[], Any]:
        return lambda: model(x)

    with no_grad():
        errors = {name: max(_error(own.network, form, b) for b in own.batches) for name, (form, _) in versions.items()}
        timing = Timer(time_limit=30.0).compare({name: call(model) for name, (model, _) in forms.items()}, runs=runs)
    seconds = {name: timing.measurements[name].p50 for name in forms}
    error, doubts = max(errors.values()), [f"Unsteady times: {doubt}." for doubt in timing.reasons]
    if as_json:
        sizes = {name: size for name, (_, size) in forms.items()}
        facts = {"model": str(own.path), "error_of_largest": error, "p50_s": seconds, "bytes_in_memory": sizes}
        typer.echo(json.dumps(facts | {"note": note, "doubts": list(timing.reasons), "saved": str(path)}))
        return
    typer.echo(f"{own.path.name}: off by {error:.2%} of the largest result on {sum(map(len, own.batches))} inputs")
    for name, (_, size) in forms.items():
        speedup = seconds["float32"] / seconds[name]
        typer.echo(f"  {name:15} {seconds[name] * 1e3:10.3f} ms  {size / 1024:12,.1f} KiB  {speedup:.2f}×")
    for line in filter(None, [note, *doubts]):
        typer.echo(f"  {line}")
    typer.echo(f"Saved as {path}")


def _error(network: Module, version: Module, batch: Any) -> float:
    """Return the largest difference between two networks' results, as a share of the largest result."""
    expected, actual = np.asarray(network(batch)), np.asarray(version(batch))
    return float(np.abs(expected - actual).max() / (np.abs(expected).max() or 1.0))


def quantize_own(own: OwnNetwork, options: dict[str, Any], out: Path, runs: int, as_json: bool) -> None:
    """Quantize a network to int8 and save it as an ONNX file with QuantizeLinear nodes, or as safetensors."""
    from tilewise import onnx
    from tilewise.quantize import quantize, save_quantized

    path = output_path(out, own, "int8")
    int8: Any = quantize(own.network, own.batches, **options)
    (onnx.save if path.suffix == ".onnx" else save_quantized)(int8, path)
    size = int(getattr(int8, "nbytes", 0)) or float_bytes(int8)
    stated = getattr(int8, "stated_error", None)
    note = "" if stated is None else f"At most {stated:.2%} expected on other inputs."
    report(own, {"int8": (int8, size)}, path, runs, as_json, note)


def prune_own(own: OwnNetwork, sparsity: float, scope: str, pattern: str, out: Path, runs: int, as_json: bool) -> None:
    """Set weights of a network to zero and save it as an ONNX file or as safetensors.

    Scope "auto" takes the scope and scores that change the results on the last calibration batch least. Both networks
    are timed with their plans; that of the pruned one skips zeros where this costs less.
    """
    from tilewise import onnx, save
    from tilewise.plan import compile

    path = output_path(out, own, "pruned")
    *others, last = own.batches
    with no_grad():
        expected = np.asarray(own.network(last))
        candidates = pruned_candidates(own.network, sparsity, scope, pattern, others or [last])
        _, zeros = min(candidates, key=lambda candidate: np.square(np.asarray(candidate[1](last)) - expected).sum())
    (onnx.save if path.suffix == ".onnx" else save)(zeros, path)
    try:
        kinds = Counter(kind == "sparse" for _, kind in compile(zeros, own.batches[0]).algorithms)
        note = f"Its plan skips the zeros of {kinds[True]} layers; the dense kernels cost less for the others."
    except TilewiseError as error:
        note = f"No zeros are skipped: {error}"
    report(own, {"pruned": (zeros, float_bytes(zeros))}, path, runs, as_json, note)


def pruned_candidates(
    model: Module, sparsity: float, scope: str, pattern: str, calibration: Iterable[Any] | None
) -> list[tuple[dict[str, Any], Any]]:
    """Prune a model in every way that `scope` allows; return the options of `prune` and the pruned model of each.

    Scope "auto" stands for several: by magnitudes and, with calibration batches, by Wanda scores.
    """
    from tilewise.prune import prune

    settings: list[dict[str, Any]] = [{"scope": name} for name in (("global", "layer") if scope == "auto" else [scope])]
    if calibration is not None and scope == "auto" and pattern == "unstructured":
        settings += [{"scope": name, "calibration": calibration} for name in ("global", "layer", "row")]
    candidates = []
    for options in settings:
        try:
            candidates.append((options, prune(model, sparsity, pattern=pattern, **options).eval()))
        except ConfigurationError:  # the scope would remove a whole layer
            if options is settings[-1] and not candidates:
                raise
    return candidates


# --- inputs ---


InputShapes = Annotated[
    list[str] | None, option("Shape of an ONNX file's input, such as x=1x3x224x224; may be repeated.", "--shape")
]
InputFiles = Annotated[
    list[str] | None, option("An ONNX file's input: x=x.npy (may be repeated), or one .npz file with all.", "--input")
]
_SIZES = re.compile(r"\d+(x\d+)*", re.IGNORECASE)
_MAX_BYTES = 1 << 33  # of one input file; arbitrary, more than any input that fits into memory


def network_inputs(
    network: Network,
    shapes: Iterable[str] | None = None,
    files: Iterable[str] | None = None,
    **sizes: Any,
) -> list[Any]:
    """Return one array per input of a network: from files, else random of a given shape or one that the file allows.

    `sizes` are those of `Network.example`: batch, seed, free, pixels.
    """
    arrays = input_arrays(network, files or ())
    shapes_by_name = {name: array.shape for name, array in arrays.items()}
    for text in shapes or ():
        name, value = _split(network, text, "--shape")
        if not _SIZES.fullmatch(value):
            raise ConfigurationError(f"--shape takes sizes such as 1x3x224x224, not {value!r}")
        if name in shapes_by_name:
            raise ConfigurationError(f"the shape of the input {name!r} is given twice")
        shapes_by_name[name] = tuple(int(size) for size in value.lower().split("x"))
    examples = network.example(shapes=shapes_by_name, **sizes)
    return [arrays.get(port.name, x) for port, x in zip(network.inputs, examples, strict=True)]


def inputs_for(
    model: str, shapes: Iterable[str] | None, files: Iterable[str] | None, **sizes: Any
) -> Callable[[Network], list[Any]] | None:
    """Return the function that creates the inputs of an ONNX file; None for other models, without such options."""
    if model.endswith(".onnx"):
        return lambda network: network_inputs(network, shapes, files, **sizes)
    if shapes or files:
        raise ConfigurationError(f"--shape and --input are for ONNX files, and {model} is not one")
    return None


def input_arrays(network: Network, files: Iterable[str], option: str = "--input") -> dict[str, Any]:
    """Read arrays by the input's name from `name=x.npy`, from `x.npy` for the only input, or from an .npz file."""
    arrays: dict[str, Any] = {}
    for text in files:
        from tilewise.costmodel.data.npz import read_npz  # loads much, so only where there are files
        from tilewise.costmodel.data.npz_stream import read_npy  # loads much, so only where there are files

        if Path(text).suffix == ".npz" and "=" not in text:
            names = [port.name for port in network.inputs]
            members = read_npz(Path(text), (), [*names, "arr_0"], _MAX_BYTES)
            if len(names) == 1 and "arr_0" in members:  # as numpy.savez names an array without a name
                members.setdefault(names[0], members["arr_0"])
            arrays |= {name: members[name] for name in names if name in members}
            if not arrays:
                raise ConfigurationError(f"{text} has none of the inputs {', '.join(names)}")
            continue
        name, path = _split(network, text, option)
        if name in arrays:
            raise ConfigurationError(f"{option} names the input {name!r} twice")
        arrays[name] = read_npy(Path(path), _MAX_BYTES)
    return arrays


def _split(network: Network, text: str, option: str) -> tuple[str, str]:
    """Split `name=value` of an option; the name may be left out if the network has one input."""
    names = [port.name for port in network.inputs]
    name, separator, value = text.rpartition("=")
    if not separator and len(names) == 1:
        return names[0], text
    if not separator:
        raise ConfigurationError(f"{network.title} takes {len(names)} inputs; write {option} {names[0]}={text}")
    if name not in names:
        raise ConfigurationError(f"{network.title} has no input {name!r}; {did_you_mean(name, names)}")
    return name, value
