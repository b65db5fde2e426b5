"""`tilewise tune`: the best tile for a shape or for every layer of a model, or a check of the tuner on your shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import AsJson, answer, argument, one_of, option, output_folder
from tilewise.cli.optimize.own_network import InputFiles, InputShapes, inputs_for
from tilewise.cli.tables import show, table, waiting

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
        argument(
            "A family (matmul), a model (a saved .safetensors or .onnx file, mlp, cnn, gpt:6x384), or a file of "
            "vLLM: moe, block-fp8."
        ),
    ] = None,
    shape: Annotated[str | None, argument("Its sizes, such as 512x4096x1024 (m x n x k).")] = None,
    check: Annotated[Path | None, option("A JSON list of problems to check the tuner on.")] = None,
    device: Annotated[str, one_of("cpu", "triton")] = "cpu",
    option: Annotated[
        list[str] | None, option("Another property of the problem, such as layout=nt; may be repeated.", "--set")
    ] = None,
    budget: Annotated[int | None, option("Measure at most this many configurations of a shape.", min=1)] = None,
    batch: Annotated[
        int | None, option("Inputs in a model's batch (default: 32; for an ONNX file the file's, or 1).", min=1)
    ] = None,
    shapes: InputShapes = None,
    files: InputFiles = None,
    tokens: Annotated[int, option("Tokens in a sequence (gpt).", min=1)] = 128,
    model: Annotated[Path | None, option("A cost model in place of the shipped one.")] = None,
    cache: Annotated[
        Path | None, output_folder(help="Folder of choices and measurements (default: your cache folder).")
    ] = None,
    fresh: Annotated[bool, option("Tune again, even if a choice is stored.")] = False,
    limit: Annotated[
        float | None, option("Measure in a separate process and give up on a configuration after this many seconds.")
    ] = None,
    seed: Annotated[int, option("Seed of the model's inputs.")] = 0,
    experts: Annotated[int, option("Experts of a layer (moe).", min=1)] = 8,
    intermediate: Annotated[
        list[int] | None, option("Intermediate size of a layer on one GPU (moe); may be repeated.", min=1)
    ] = None,
    dtype: Annotated[str | None, one_of("bf16", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")] = None,
    block_scaled: Annotated[bool, option("Weights have one scale per block of 128 x 128 (moe).")] = False,
    device_name: Annotated[
        str | None, option("GPU that a file of vLLM is for, such as NVIDIA_H200 (default: this machine's).")
    ] = None,
    batch_sizes: Annotated[
        str | None, option("Numbers of tokens in a file of vLLM, as in 1,16,256 (default: vLLM's).")
    ] = None,
    out: Annotated[Path, output_folder(help="Folder, or file, for files of vLLM.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Find the best tile: ask the cost model, measure a few candidates, keep the fastest.

    Example: tilewise tune matmul 512x4096x1024 --set layout=nt

    For moe and block-fp8 nothing is measured: the command writes the file that vLLM reads for a shape and a GPU.
    Example: tilewise tune moe --experts 128 --intermediate 768 --device-name NVIDIA_H200 --out configs
    """
    from tilewise.backend.tuned import calibration_offer
    from tilewise.errors import ConfigurationError
    from tilewise.tune.choose.tuner import Tuner

    say = functools.partial(typer.echo, err=True)
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
        return answer(as_json, facts, *(f"{path} written" for path in facts["files"]))
    serving = {"intermediate": intermediate, "dtype": dtype, "device-name": device_name, "batch-sizes": batch_sizes}
    if names := [f"--{name}" for name, value in serving.items() if value]:
        raise ConfigurationError(f"{', '.join(names)} applies to moe and block-fp8 only, not to {what}")
    make_inputs = inputs_for(what, shapes, files, batch=batch, seed=seed, free=tokens)
    tuner = Tuner(device, model=model, cache=cache, budget=budget, limit_s=limit, say=say)
    if shape is None and what not in _family_names_of(device) and not _SHAPE.match(what):
        _check_spelling(what, device)
        sizes = {"batch": batch, "tokens": tokens, "seed": seed, "make_inputs": make_inputs}
        _tune_model(what, tuner, sizes, as_json)
    else:
        spec = _spec(what, shape, option or [], device)
        with _measuring(spec["family"]) as report:
            tuned = tuner.tune(spec, fresh=fresh, report=report)
        answer(as_json, _as_dict(tuned), *_describe_result(tuned), _describe_usage(tuner, tuned))
        offer = calibration_offer() if tuner.device.kind == "cpu" else None
        if offer is not None:
            say(offer)


def _family_names_of(device: str) -> list[str]:
    """List the kernel families that can be tuned on "cpu" or on the GPU."""
    if device == "cpu":
        from tilewise.tune.families.cpu.family import family_names
    else:
        from tilewise.gpu.families.family import family_names
    return family_names()


def _check_spelling(what: str, device: str) -> None:
    """Raise an error if `what` looks like a misspelt kernel family rather than a model or a file."""
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


def _tile(family: str, config: Mapping[str, Any]) -> Any:
    """Return a configuration as Python code takes it: a native tile object, or another kernel's fields as text."""
    from tilewise.store.problem import Config
    from tilewise.tune.families.cpu.family import tile_for

    op = {"batched_matmul": "matmul"}.get(family, family)
    native = "register_m" in config and op in ("matmul", "conv2d", "int8_matmul")
    return tile_for(op, Config(config)) if native else " ".join(f"{name}={value}" for name, value in config.items())


@contextmanager
def _measuring(family: str) -> Iterator[Callable[[Any, Any], None]]:
    """Yield a function that prints one line per measurement: replaced on a terminal, appended in a log."""
    with waiting("ranking") as say:

        def report(step: Any, config: Any) -> None:
            took = "failed" if step.runtime_ns is None else f"{step.runtime_ns / 1e3:.1f} us"
            say(f"measured {took}  {_tile(family, config)}")

        yield report


def _as_dict(tuned: Tuned) -> dict[str, Any]:
    """Turn a tuning result into JSON data, its tile written as fields."""
    tile = _tile(tuned.problem.family, tuned.config)
    return {
        **asdict(replace(tuned, problem=None, config=None)),  # type: ignore[arg-type]
        "problem": dict(tuned.problem),
        "config": dict(tuned.config) if isinstance(tile, str) else asdict(tile),
        "speedup": tuned.speedup,
    }


def _describe_result(tuned: Tuned) -> list[str]:
    """Describe a tuning result in lines: the tile, its runtime beside the default's, and the choice's source."""
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
    """Say where a tile comes from: measured now, stored earlier, or predicted."""
    if tuned.source == "measured":
        again = "; those within noise of the fastest were timed again before one was chosen"
        claim = "; within 5 % of the fastest (calibrated)" * bool(tuned.within5)
        return tuned.reason + again * (tuned.measurements > 1) + claim
    origin = {"model": "the model's choice", "default": "the default", "service": "the service's choice"}
    return f"{origin.get(tuned.source, tuned.source)}: {tuned.reason or 'chosen without measuring'}"


def _describe_usage(tuner: Tuner, tuned: Tuned) -> str:
    """Say which processes use the tuned tile from now on."""
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

    result = tune_model(name, tuner, **sizes, report=functools.partial(typer.echo, err=True))
    if as_json:
        layers = [
            {name: layer[name] for name in ("layer", "op", "shape")}
            | {"tuned": layer["tuned"] and _as_dict(layer["tuned"])}
            for layer in result.layers
        ]
        facts = {"model": name, "before_ns": result.before_ns, "after_ns": result.after_ns, "layers": layers}
        useful, dropped = ([dict(problem) for problem in problems] for problems in (result.useful, result.dropped))
        return answer(as_json, facts | {"kept": useful, "dropped": dropped})
    rows = []
    for layer in result.layers:
        kernel, tuned = f"{layer['op']} {'x'.join(map(str, layer['shape']))}", layer["tuned"]
        numbers: tuple[str, ...] = ("cached" if tuned is not None else "no tiles to tune", "", "")
        if tuned is not None and tuned.default_ns is not None and tuned.runtime_ns is not None:
            numbers = f"{tuned.default_ns / 1e3:.1f}", f"{tuned.runtime_ns / 1e3:.1f}", f"{tuned.speedup:.2f}x"
        rows.append((layer["layer"], kernel, *numbers))
    headings = ("layer", "kernel", "before us", "after us", "faster")
    show(table(headings, rows, left_aligned=headings[:2]))
    typer.echo(
        f"one call: {result.before_ns / 1e6:.3f} ms before, {result.after_ns / 1e6:.3f} ms after "
        f"({result.speedup:.3f}x); tuned in {result.seconds:.1f} s"
    )
    typer.echo(_describe_kept_tiles(result))


def _describe_kept_tiles(result: TunedModel) -> str:
    """Say how many of the faster tiles are stored, and why not all of them."""
    faster, kept_count = len(result.useful) + len(result.dropped), len(result.useful)
    if not faster:
        return "nothing is kept: the default tiles are the fastest that were found"
    if not kept_count:
        subject = "one tile is" if faster == 1 else f"{faster} tiles are"
        return f"nothing is kept: {subject} faster alone, but the whole model is not"
    return f"kept: {kept_count} of {faster} tiles, which the next process uses; TILEWISE_TUNED=0 switches that off"


def _check_against_exhaustive_search(path: Path, device: str, model: Path | None, as_json: bool) -> None:
    """Compare the tuner's choices for the problems of a file with the best of all configurations, and print both."""
    from tilewise.store.problem import read_shapes
    from tilewise.tune.choose.tuner import check
    from tilewise.tune.measure.collector import problem_parser

    kernels = read_shapes(path, problem_parser(device))
    problems = [kernel.problem for kernel in kernels]
    result = check(problems, device, model=str(model) if model else None, say=functools.partial(typer.echo, err=True))
    if as_json:
        return answer(as_json, result)
    rows = []
    for row in result["problems"]:
        problem = row["problem"]
        words = [f"{name}={value}" for name, value in problem.items() if name not in ("family", "dtype")]
        seconds = f"{row['five_seconds']:.2f}", f"{row['exhaustive_seconds']:.2f}"
        name = f"{problem['family']} {problem.get('dtype', '')} {' '.join(words)}"
        rows.append((name, row["configs"], *_three_ratios(row), *seconds))
    rows.append(("geometric mean", "", *_three_ratios(result), "", ""))
    title = f"{result['machine']}: fastest / chosen, interleaved; tuning times from an empty cache"
    show(table(("problem", "configs", "default", "first", "five", "five s", "all s"), rows, title))
    for line in (f"tuning {result['time_ratio']:.0f} times faster than exhaustive", *result["notes"]):
        typer.echo(line)


def _three_ratios(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:.3f}" for name in ("default", "first", "five")]
