"""`tilewise tune`: the best tile for a shape or for every layer of a model, or a check of the tuner on your shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import AsJson, one_of, output_folder
from tilewise.cli.optimize.own_network import InputFiles, InputShapes, inputs_for
from tilewise.cli.tables import waiting

if TYPE_CHECKING:
    from tilewise.tune.choose.network import TunedModel
    from tilewise.tune.choose.tuner import Tuned, Tuner

_SHAPE = re.compile(r"^\d+(x\d+)+$")
_SIZES = {
    "matmul": ("m", "n", "k"),
    "batched_matmul": ("batch", "m", "n", "k"),
    "int8_matmul": ("m", "n", "k"),
    "conv2d": ("batch", "channels", "height", "width", "filters", "kernel"),
    "attention": ("batch", "heads", "queries", "head"),
    "grouped_matmul": ("tokens", "top_k", "experts", "n", "k"),
    "block_fp8_matmul": ("m", "n", "k"),
}
_EXAMPLE_SIZES = {"conv2d": "8x64x32x32x64x3"}  # else 64 of everything


def tune(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A family (matmul), a model (a saved .safetensors or .onnx file, mlp, cnn, gpt:6x384), or a file of "
            "vLLM: moe, block-fp8."
        ),
    ] = None,
    shape: Annotated[str | None, typer.Argument(help="Its sizes, such as 512x4096x1024 (m x n x k).")] = None,
    check: Annotated[Path | None, typer.Option(help="A JSON list of problems to check the tuner on.")] = None,
    device: Annotated[str, one_of("cpu", "triton")] = "cpu",
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another property of the problem, such as layout=nt; may be repeated."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Measure at most this many configurations of a shape.", min=1)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Inputs in a model's batch (default: 32; for an ONNX file the file's, or 1).", min=1),
    ] = None,
    shapes: InputShapes = None,
    files: InputFiles = None,
    tokens: Annotated[int, typer.Option(help="Tokens in a sequence (gpt).", min=1)] = 128,
    model: Annotated[Path | None, typer.Option(help="A cost model in place of the shipped one.")] = None,
    cache: Annotated[
        Path | None, output_folder(help="Folder of choices and measurements (default: your cache folder).")
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Fine-tune the cost model on everything measured here (needs PyTorch).")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Tune again, even if a choice is stored.")] = False,
    limit: Annotated[
        float | None,
        typer.Option(help="Measure in a separate process and give up on a configuration after this many seconds."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model's inputs.")] = 0,
    experts: Annotated[int, typer.Option(help="Experts of a layer (moe).", min=1)] = 8,
    intermediate: Annotated[
        list[int] | None, typer.Option(help="Intermediate size of a layer on one GPU (moe); may be repeated.", min=1)
    ] = None,
    dtype: Annotated[str | None, one_of("bf16", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")] = None,
    block_scaled: Annotated[
        bool, typer.Option("--block-scaled", help="Weights have one scale per block of 128 x 128 (moe).")
    ] = False,
    device_name: Annotated[
        str | None, typer.Option(help="GPU that a file of vLLM is for, such as NVIDIA_H200 (default: this machine's).")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Numbers of tokens in a file of vLLM, as in 1,16,256 (default: vLLM's).")
    ] = None,
    out: Annotated[Path, output_folder(help="Folder, or file, for files of vLLM.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Find the best tile: ask the cost model, measure a few candidates, keep the fastest.

    Example: tilewise tune matmul 512x4096x1024 --set layout=nt

    For moe and block-fp8 nothing is measured: the command writes the file that vLLM reads for a shape and a GPU.
    Example: tilewise tune moe --experts 128 --intermediate 768 --device-name NVIDIA_H200 --out configs
    """
    from tilewise.errors import ConfigurationError
    from tilewise.tune.choose.tuner import Tuner

    say = _print_to_stderr
    if check is not None:
        _check_against_exhaustive_search(check, device, model, as_json)
        return
    if what is None:
        raise ConfigurationError("name what to tune: a family and its sizes, a model, or --check shapes.json")
    if what in ("moe", "block-fp8"):
        from tilewise.cli.serving import write_serving_files

        layer = {"experts": experts, "intermediate": intermediate, "shape": shape, "dtype": dtype}
        facts = write_serving_files(
            what, layer, block_scaled=block_scaled, device_name=device_name, batch_sizes=batch_sizes, out=out
        )
        typer.echo(json.dumps(facts) if as_json else "\n".join(f"{path} written" for path in facts["files"]))
        return
    serving = {"intermediate": intermediate, "dtype": dtype, "device-name": device_name, "batch-sizes": batch_sizes}
    if names := [f"--{name}" for name, value in serving.items() if value]:
        raise ConfigurationError(f"{', '.join(names)} applies to moe and block-fp8 only, not to {what}")
    make_inputs = inputs_for(what, shapes, files, batch=batch, seed=seed, free=tokens)
    tuner = Tuner(device, model=model, cache=cache, budget=budget, limit_s=limit, learn=learn, say=say)
    if shape is None and what not in _family_names_of(device) and not _SHAPE.match(what):
        _check_spelling(what, device)
        sizes = {"batch": batch, "tokens": tokens, "seed": seed, "make_inputs": make_inputs}
        _tune_model(what, tuner, sizes, as_json)
    else:
        tuned = _tune_shape(tuner, _spec(what, shape, option or [], device), fresh)
        lines = [*_describe_result(tuned), _describe_usage(tuner, tuned)]
        typer.echo(json.dumps(_as_dict(tuned)) if as_json else "\n".join(lines))
        _suggest_calibration(tuner)
    if learn:
        from tilewise.tune.choose.finetune import learn as fine_tune

        typer.echo(str(fine_tune(tuner, say)), err=as_json)


def _print_to_stderr(line: str) -> None:
    typer.echo(line, err=True)


def _family_names_of(device: str) -> list[str]:
    if device == "cpu":
        from tilewise.tune.families.cpu.family import family_names
    else:
        from tilewise.gpu.families.family import family_names
    return family_names()


def _check_spelling(what: str, device: str) -> None:
    """Raise an error for a word that is neither a model nor a file, but almost the name of a family."""
    import difflib

    from tilewise.errors import ConfigurationError
    from tilewise.profile.targets import MODELS

    near = difflib.get_close_matches(what, [*MODELS, *_family_names_of(device)], n=1)
    if near and what.partition(":")[0] not in MODELS and not Path(what).exists():
        raise ConfigurationError(f"there is no model or family {what!r}; did you mean {near[0]!r}?")


def _spec(family: str, shape: str | None, options: list[str], device: str) -> dict[str, Any]:
    """Parse a problem from its family, its sizes such as 512x4096x1024, and `--set` options."""
    from tilewise.errors import ConfigurationError, did_you_mean
    from tilewise.profile.targets import MODELS

    shape = shape.lower().replace("×", "x") if shape else shape  # × is how our own tables write it
    if family not in (families := _family_names_of(device)):
        if _SHAPE.match(family):
            raise ConfigurationError(f"the family comes before its sizes: tilewise tune {shape or 'matmul'} {family}")
        if family in MODELS:
            raise ConfigurationError(f"{family} is a model and takes no sizes: tilewise tune {family} --batch 8")
        raise ConfigurationError(f"there is no family {family!r} on this device; {did_you_mean(family, families)}")
    names = _SIZES.get(family, ("rows", "cols"))
    sizes = [int(size) for size in shape.split("x")] if shape and _SHAPE.match(shape) else []
    if len(sizes) != len(names) and (shape is not None or not options):
        example = _EXAMPLE_SIZES.get(family, "x".join("64" for _ in names))
        raise ConfigurationError(f"the sizes of {family} are {' x '.join(names)}, such as {example}")
    spec: dict[str, Any] = {"family": family, **dict(zip(names, sizes, strict=False))}
    for word in options:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes name=value, as in layout=nt, not {word!r}")
        if name in spec:
            raise ConfigurationError(f"--set {word}: {name} is {spec[name]} already")
        spec[name] = int(value) if value.lstrip("-").isdigit() else value
    return spec


def _tune_shape(tuner: Tuner, spec: dict[str, Any], fresh: bool) -> Tuned:
    with _measuring(spec["family"]) as report:
        return tuner.tune(spec, fresh=fresh, report=report)


def _tile(family: str, config: Mapping[str, Any]) -> Any:
    """Return a configuration as Python code takes it: a native tile, or the fields of another kernel as text."""
    from tilewise.store.problem import Config
    from tilewise.tune.families.cpu.family import tile_for

    op = {"batched_matmul": "matmul"}.get(family, family)
    native = "register_m" in config and op in ("matmul", "conv2d", "int8_matmul")
    return tile_for(op, Config(config)) if native else " ".join(f"{name}={value}" for name, value in config.items())


def _config_fields(tuned: Tuned) -> dict[str, Any]:
    tile = _tile(tuned.problem.family, tuned.config)
    return dict(tuned.config) if isinstance(tile, str) else asdict(tile)


@contextmanager
def _measuring(family: str) -> Iterator[Callable[[Any, Any], None]]:
    """Yield a function that prints one line per measurement: replaced on a terminal, appended in a log."""

    def line(step: Any, config: Any) -> str:
        took = "failed" if step.runtime_ns is None else f"{step.runtime_ns / 1e3:.1f} us"
        return f"{took}  {_tile(family, config)}"

    with waiting("ranking") as say:
        yield lambda step, config: say(f"measured {line(step, config)}")


def _as_dict(tuned: Tuned) -> dict[str, Any]:
    return {
        **asdict(replace(tuned, problem=None, config=None)),  # type: ignore[arg-type]
        "problem": dict(tuned.problem),
        "config": _config_fields(tuned),
        "speedup": tuned.speedup,
    }


def _describe_result(tuned: Tuned) -> list[str]:
    lines = [str(_tile(tuned.problem.family, tuned.config))]
    if tuned.runtime_ns is not None:
        took = f"{tuned.runtime_ns / 1e3:.1f} us"
        comparison = f", the default {tuned.default_ns / 1e3:.1f} us{_ratio(tuned)}" if tuned.default_ns else ""
        if tuned.source == "cache":
            return [*lines, f"{took} when it was tuned; --fresh measures again"]
        lines.append(f"{took}{comparison}; {tuned.measurements} measured in {tuned.seconds:.2f} s")
    return [*lines, _describe_source(tuned)]


def _ratio(tuned: Tuned) -> str:
    """Return the speedup over the default with its interval; 1 if the default stays."""
    if tuned.gain is not None and tuned.gain.excludes_zero:
        return f": {tuned.gain}, 95 % interval"
    return f": {tuned.speedup:.3f}x"


def _describe_source(tuned: Tuned) -> str:
    """Describe where the choice comes from."""
    if tuned.source == "measured":
        again = "; those within noise of the fastest were timed again before one was chosen"
        claim = "; within 5 % of the fastest (calibrated)" * bool(tuned.within5)
        return tuned.reason + again * (tuned.measurements > 1) + claim
    origin = {"model": "the model's choice", "default": "the default", "service": "the service's choice"}
    return f"{origin.get(tuned.source, tuned.source)}: {tuned.reason or 'chosen without measuring'}"


def _suggest_calibration(tuner: Tuner) -> None:
    from tilewise.backend.tuned import calibration_offer

    offer = calibration_offer() if tuner.device.kind == "cpu" else None
    if offer is not None:
        _print_to_stderr(offer)


def _describe_usage(tuner: Tuner, tuned: Tuned) -> str:
    """Describe which processes use the choice from now on."""
    if tuned.source == "default" and tuned.runtime_ns is None:
        return "nothing is stored, and the default stays in use"
    if tuned.config == tuner.device.default(tuned.problem):
        undecided = tuned.gain is not None and tuned.gain.on_busy_machine
        return f"nothing is gained; the default stays in use{'; try again on a quiet machine' * undecided}"
    if tuner.device.kind != "cpu":
        return f"kept in {tuner.choices.path}"
    from tilewise.tune.choose.cache import cache_folder

    if tuner.folder == cache_folder():
        threads = tuned.problem.get("threads", 1)
        where = f"on {threads} thread{'s' if threads != 1 else ''}"
        return f"kept: the next process uses it {where}; TILEWISE_TUNED=0 switches that off"
    return f"kept in {tuner.choices.path}, which tilewise.tune.enable(cache=...) reads"


def _tune_model(name: str, tuner: Tuner, sizes: dict[str, Any], as_json: bool) -> None:
    """Tune every layer of a model and print the time of each before and after."""
    from tilewise.tune.choose.network import tune_model

    result = tune_model(name, tuner, **sizes, report=_print_to_stderr)
    if as_json:
        layers = [
            {name: layer[name] for name in ("layer", "op", "shape")}
            | {"tuned": layer["tuned"] and _as_dict(layer["tuned"])}
            for layer in result.layers
        ]
        typer.echo(
            json.dumps(
                {
                    "model": name,
                    "before_ns": result.before_ns,
                    "after_ns": result.after_ns,
                    "kept": [dict(problem) for problem in result.useful],
                    "dropped": [dict(problem) for problem in result.dropped],
                    "layers": layers,
                }
            )
        )
        return
    typer.echo(f"{'layer':32} {'kernel':36} {'before us':>10} {'after us':>10} {'faster':>7}")
    for layer in result.layers:
        name, kernel = layer["layer"], f"{layer['op']} {'x'.join(map(str, layer['shape']))}"
        tuned = layer["tuned"]
        if tuned is None or tuned.default_ns is None or tuned.runtime_ns is None:
            origin = "cached" if tuned is not None else "no tiles to tune"
            typer.echo(f"{name:32} {kernel:36} {origin:>10}")
            continue
        numbers = f"{tuned.default_ns / 1e3:10.1f} {tuned.runtime_ns / 1e3:10.1f} {tuned.speedup:6.2f}x"
        typer.echo(f"{name:32} {kernel:36} {numbers}")
    typer.echo(
        f"one call: {result.before_ns / 1e6:.3f} ms before, {result.after_ns / 1e6:.3f} ms after "
        f"({result.speedup:.3f}x); tuned in {result.seconds:.1f} s"
    )
    typer.echo(_describe_kept_tiles(result))


def _describe_kept_tiles(result: TunedModel) -> str:
    faster, kept_count = len(result.useful) + len(result.dropped), len(result.useful)
    if not faster:
        return "nothing is kept: the default tiles are the fastest that were found"
    if not kept_count:
        subject = "one tile is" if faster == 1 else f"{faster} tiles are"
        return f"nothing is kept: {subject} faster alone, but the whole model is not"
    return f"kept: {kept_count} of {faster} tiles, which the next process uses; TILEWISE_TUNED=0 switches that off"


def _check_against_exhaustive_search(path: Path, device: str, model: Path | None, as_json: bool) -> None:
    from tilewise.store.problem import read_shapes
    from tilewise.tune.choose.check import check
    from tilewise.tune.measure.collect import problem_parser

    kernels = read_shapes(path, problem_parser(device))
    problems = [kernel.problem for kernel in kernels]
    result = check(problems, device, model=str(model) if model else None, say=_print_to_stderr)
    typer.echo(json.dumps(result) if as_json else "\n".join(_check_table(result)))


def _check_table(result: Mapping[str, Any]) -> list[str]:
    """Format the comparison as lines of text."""
    lines = [
        f"{result['machine']}: fastest / chosen, interleaved; tuning times from an empty cache",
        f"{'problem':58} {'configs':>7} {'default':>8} {'first':>7} {'five':>7} {'five s':>8} {'all s':>8}",
    ]
    for row in result["problems"]:
        problem = row["problem"]
        words = [f"{name}={value}" for name, value in problem.items() if name not in ("family", "dtype")]
        name = f"{problem['family']} {problem.get('dtype', '')} {' '.join(words)}"
        ratios = f"{row['default']:8.3f} {row['first']:7.3f} {row['five']:7.3f}"
        seconds = f"{row['five_seconds']:8.2f} {row['exhaustive_seconds']:8.2f}"
        lines.append(f"{name:58} {row['configs']:7d} {ratios} {seconds}")
    means = f"{result['default']:8.3f} {result['first']:7.3f} {result['five']:7.3f}"
    faster = f"tuning {result['time_ratio']:.0f} times faster than exhaustive"
    return [*lines, f"{'geometric mean':58} {'':7} {means}   {faster}", *result["notes"]]
