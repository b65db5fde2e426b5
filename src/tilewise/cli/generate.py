"""`tilewise generate` and `tilewise kv`: text as it comes, and what the cache saves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.nn import GPT

_MODEL_HELP = "gpt (the trained one), gpt:SIZE (random weights, SIZE 4x128, 6x384 or 12x768), or a .safetensors file."


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; token ids for a GPT-2 file.")] = "import ",
    model: Annotated[str, typer.Option(help=_MODEL_HELP)] = "gpt",
    tokens: Annotated[int, typer.Option(min=0, help="New tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens with this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes the draws.")] = 0,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep keys and values of earlier tokens.")] = True,
    int8: Annotated[bool, typer.Option("--int8", help="Decode with int8 weights.")] = False,
    int4: Annotated[bool, typer.Option("--int4", help="Decode with four-bit weights.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of the native kernels.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Continue a text with a GPT, streaming, and say how many tokens a second that was.

    Example: tilewise generate "import " --tokens 100 --no-cache
    """
    from tilewise import data, set_num_threads
    from tilewise.generate import generate as run

    if threads is not None:
        set_num_threads(threads)
    network, encode, decode = _model(model)
    ids = encode(prompt)
    if encode is data.encode and not as_json and decode(ids) != prompt:
        known = decode(ids)
        typer.echo(f"The model knows the characters of ASCII only, so it reads the prompt as {known!r}.", err=True)
    if int8 and int4:
        raise ConfigurationError("weights have eight bits or four: choose one of --int8 and --int4")
    weights = "int8" if int8 else "int4" if int4 else "float32"
    stream = run(network, ids, tokens, cache, temperature, top_k, top_p, seed, weights=weights)
    if not as_json:
        sys.stdout.write(prompt)
    new, start = [], time.perf_counter()
    for token in stream:
        new.append(token)
        if not as_json:
            sys.stdout.write(decode([token]))
            sys.stdout.flush()
    seconds = time.perf_counter() - start
    rate = len(new) / seconds if seconds > 0 else 0.0
    if as_json:
        facts = {"prompt": prompt, "text": decode(new), "tokens": new, "tokens_per_second": rate, "cache": cache}
        print(json.dumps(facts))
    else:
        print(
            f"\n\n{len(new)} token{'s' * (len(new) != 1)}, {rate:,.0f} a second, "
            f"{'with' if cache else 'without'} a cache, {weights} weights"
        )


def kv(
    model: Annotated[str, typer.Option(help=_MODEL_HELP)] = "gpt:6x384",
    tokens: Annotated[int, typer.Option(min=8, help="Positions to measure.")] = 200,
    out: Annotated[Path, typer.Option(help="Where the picture (PNG) goes.")] = Path("out/kv.png"),
    threads: Annotated[int | None, typer.Option(help="Threads of the native kernels.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the times as JSON.")] = False,
) -> None:
    """Draw the time of a token against its position, with and without the cache: the best of three runs each.

    Example: tilewise kv --model gpt:4x128 --tokens 128 --out kv.png
    """
    from tilewise import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    network, _, _ = _model(model)
    if tokens > network.context:
        raise ConfigurationError(f"--tokens {tokens} is more than the model's context of {network.context}")
    cached, uncached = _seconds_per_token(network, tokens, True), _seconds_per_token(network, tokens, False)
    _draw(cached, uncached, model, out)
    ratio = sum(uncached) / sum(cached)
    if as_json:
        print(json.dumps({"cached_s": cached, "uncached_s": uncached, "speedup": ratio, "picture": str(out)}))
    else:
        print(f"{tokens} tokens: {sum(cached):.3f} s with the cache, {sum(uncached):.3f} s without ({ratio:.1f}×)")
        print(f"last token: {cached[-1] * 1e3:.2f} ms with, {uncached[-1] * 1e3:.2f} ms without; picture in {out}")


def _model(name: str) -> tuple[GPT, Callable[[str], Any], Callable[[Any], str]]:
    """The model, and how text becomes its tokens and back."""
    from tilewise import data, models
    from tilewise.generate import load_gpt

    if name == "gpt":
        return models.pretrained("gpt"), data.encode, data.decode
    if name.startswith("gpt:"):
        return models.gpt(name[4:], vocab=len(data.VOCABULARY)), data.encode, data.decode
    if not Path(name).exists():
        raise ConfigurationError(f"there is no model {name!r}; use {_MODEL_HELP.rstrip('.')}")
    network = load_gpt(name)
    if network.vocab == len(data.VOCABULARY):
        return network, data.encode, data.decode
    return network, _ids, lambda ids: "".join(f" {i}" for i in ids)


def _ids(prompt: str) -> list[int]:
    try:
        return [int(part) for part in prompt.replace(",", " ").split()]
    except ValueError:
        raise ConfigurationError("this model's prompt is a list of token ids, such as '464 3290'") from None


def _seconds_per_token(network: GPT, tokens: int, cache: bool, rounds: int = 3) -> list[float]:
    """The shortest time of each position, so that what else the machine does stays out of the picture."""
    return [min(times) for times in zip(*(_one_run(network, tokens, cache) for _ in range(rounds)), strict=True)]


def _one_run(network: GPT, tokens: int, cache: bool) -> list[float]:
    from tilewise.generate import generate as run

    stream, times = run(network, [0], tokens, use_cache=cache), []
    start = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return times


def _draw(cached: list[float], uncached: list[float], model: str, out: Path) -> None:
    from tilewise.cli.pictures import BLUE, RED, picture

    with picture(out) as axes:
        for seconds, label, colour in ((uncached, "without the cache", RED), (cached, "with the cache", BLUE)):
            axes.plot(range(1, len(seconds) + 1), [s * 1e3 for s in seconds], color=colour, label=label)
        title = f"Time of one token, {model}"
        axes.set(xlabel="position of the token", ylabel="milliseconds (logarithmic)", yscale="log", title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
        axes.grid()
