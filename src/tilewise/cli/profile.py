"""`tilewise profile`: time and memory of a model or a script, compared with this machine's peaks."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.every import AsJson, Threads, argument, option, output_file
from tilewise.cli.optimize.own_network import InputFiles, InputShapes, inputs_for

if TYPE_CHECKING:
    from tilewise.profile import ProfilerContext
    from tilewise.profile.targets import Target


def profile(
    model: Annotated[
        str | None,
        argument(
            "mlp, cnn, vgg6, resnet8, gpt, gpt:6x384, one of the zoo (resnet18), or a .safetensors or .onnx file."
        ),
    ] = None,
    script: Annotated[Path | None, option("Profile this Python program instead of a model.")] = None,
    arguments: Annotated[list[str] | None, option("An argument for the script; may be repeated.", "--arg")] = None,
    batch: Annotated[
        int | None, option("Inputs in a batch (default: 32; for an ONNX file the file's, or 1).", min=1)
    ] = None,
    shapes: InputShapes = None,
    files: InputFiles = None,
    tokens: Annotated[int, option("Tokens in a sequence (gpt).", min=1)] = 128,
    repeat: Annotated[int, option("Recorded calls, after a warm-up.", min=1)] = 5,
    backward: Annotated[bool, option("Also run the backward pass.")] = False,
    backend: Annotated[str | None, option("Route operations through this backend, such as numpy.")] = None,
    threads: Threads = None,
    seed: Annotated[int, option("Seed of weights and inputs.")] = 0,
    html: Annotated[Path | None, output_file(help="Write a page with a timeline and a roofline plot.")] = None,
    trace: Annotated[Path | None, output_file(help="Write a Chrome trace, for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where time and memory go, by layer and by operation, and what limits the program.

    A network of an ONNX file or of the zoo runs as a plan, as in `tilewise run`; with `--backend` or `--backward`, and
    for reference models, layers run one by one.

    The exit code is the script's; an error in the script is reported in one sentence, with exit code 2.

    Example: tilewise profile cnn --batch 32 --html cnn.html
    """
    import sys
    from contextlib import nullcontext, redirect_stdout

    from tilewise.backend import use_backend
    from tilewise.backend.tuned import calibration_offer
    from tilewise.errors import ConfigurationError

    if (model is None) == (script is None):
        raise ConfigurationError("name what to profile: a model (tilewise profile cnn) or --script my.py")
    with use_backend(backend) if backend else nullcontext():
        if script is not None:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():  # only the JSON goes to standard output
                profiler, extra = _profile_script(script, arguments or [])
        else:
            from tilewise.models.zoo import ZOO
            from tilewise.profile.targets import model_target

            assert model is not None
            make_inputs = inputs_for(model, shapes, files, batch=batch, seed=seed, free=tokens)
            _check_batch(model, batch, backward, tokens, seed)
            target = model_target(model, batch, backward, tokens, seed, make_inputs)
            if not (backward or backend) and (model.endswith(".onnx") or model in ZOO):
                target = target.planned()  # the form in which `tilewise run` runs it
            profiler, extra = _profile_model(target, repeat)
    _print(profiler, extra, as_json)
    offer = None if as_json else calibration_offer()
    if offer is not None:
        typer.echo(offer, err=True)
    written = [profiler.export_html(html, f"tilewise profile: {model or script}")] if html else []
    written += [profiler.export_trace(trace)] if trace else []
    for path in written:
        typer.echo(f"Wrote {path}.", err=as_json)
    if extra.get("exit_code"):
        raise typer.Exit(extra["exit_code"])


def _check_batch(model: str, batch: int | None, backward: bool, tokens: int, seed: int) -> None:
    """Reject a large batch if the memory of one input times the batch exceeds the machine's."""
    from tilewise.cli.every import check_memory
    from tilewise.profile import MemoryProfiler
    from tilewise.profile.targets import model_target

    if batch is None or batch <= 1024:
        return
    one = MemoryProfiler(leak_seconds=0.0).profile(model_target(model, 1, backward, tokens, seed).call)
    check_memory(batch * one.peak_bytes, f"--batch {batch}")


def _profile_model(target: Target, repeat: int) -> tuple[ProfilerContext, dict[str, Any]]:
    """Time a model, profile `repeat` calls of it, and measure its memory."""
    from tilewise.profile import MemoryProfiler, ProfilerContext, Timer

    target.call()  # warm up: start the threads and pack the weights
    timing = Timer(time_limit=20.0).measure(target.call, warmup=2, runs=max(repeat, 10))
    profiler = ProfilerContext()
    with profiler:
        profiler.models.append(weakref.ref(target.model))  # for the layers' names: a plan does not call the model
        for _ in range(repeat):
            target.call()
    memory = MemoryProfiler(leak_seconds=3.0).profile(target.call)
    calls = "call" if repeat == 1 else "calls"
    if target.is_planned:
        note = "the network ran as a plan, as in `tilewise run`; with --backend native its layers run one by one"
    else:
        note = "layers ran one by one; a call outside of a profile uses a plan where it can (tilewise run)"
    title = f"{target.name}, {repeat} {calls}"
    return profiler, {"title": title, "timing": timing, "memory": memory, "note": note}


def _profile_script(script: Path, arguments: list[str]) -> tuple[ProfilerContext, dict[str, Any]]:
    """Run a Python script under the profiler; return the profile and the report's title, note and exit code."""
    from tilewise.profile import ProfilerContext
    from tilewise.profile.targets import run_script

    with ProfilerContext() as profiler:
        ending = run_script(script, arguments)
    return profiler, {"title": str(script), "note": ending.note, "exit_code": ending.exit_code}


def _print(profiler: ProfilerContext, extra: dict[str, Any], as_json: bool) -> None:
    """Print the profile as JSON, with the facts in `extra`, or as text."""
    timing, memory = extra.get("timing"), extra.get("memory")
    if as_json:
        data = profiler.get_results().as_dict() | {"title": extra["title"], "note": extra.get("note", "")}
        data["exit_code"] = extra.get("exit_code", 0)
        data |= {"timing": timing.as_dict() if timing else None, "memory": memory.as_dict() if memory else None}
        typer.echo(json.dumps(data, indent=1))
        return
    typer.echo(f"{extra['title']}\n")
    typer.echo(profiler.report())
    if timing is not None:
        typer.echo(f"\nTime of one call: {timing}")
    if memory is not None:
        typer.echo(f"Memory of one call: {memory}")
    if extra.get("note"):
        typer.echo(f"Note: {extra['note']}.")
