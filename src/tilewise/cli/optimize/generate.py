"""`tilewise generate` streams text from a language model; `tilewise kv` plots the effect of the KV cache."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, Threads, argument, option, output_picture
from tilewise.cli.pictures import can_draw
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.generate.engine import LanguageModel

_MODEL_HELP = (
    "gpt (the trained one), gpt:SIZE (random weights, SIZE 4x128, 6x384 or 12x768), a .gguf or a .safetensors file."
)


def generate(
    prompt: Annotated[
        str | None,
        argument(
            'Text to continue ("import " if none), - to read it from standard input; token ids for a GPT-2 '
            "safetensors file; with --chat a question, or a .gguf file to talk to."
        ),
    ] = None,
    model: Annotated[str, option(_MODEL_HELP)] = "gpt",
    tokens: Annotated[int, option("New tokens.", min=0)] = 200,
    temperature: Annotated[float, option("Randomness; 0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, option("Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, option("Sample from the smallest set of tokens with this total probability (top-p).")
    ] = None,
    seed: Annotated[int, option("Seed of the sampling.")] = 0,
    stop: Annotated[list[str] | None, option("Stop before this text; may be repeated.")] = None,
    cache: Annotated[
        bool, option("Cache keys and values of earlier tokens (KV cache), or compute them again.", "--cache/--no-cache")
    ] = True,
    chat: Annotated[bool, option("Answer as the file's chat template says; without a question, line by line.")] = False,
    system: Annotated[str, option("Instructions before a chat.")] = "",
    int8: Annotated[bool, option("Decode with int8 weights.")] = False,
    int4: Annotated[bool, option("Decode with four-bit weights.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a GPT or a LLaMA, streaming, and report tokens per second; Ctrl-C stops it.

    Example: tilewise generate "import " --tokens 100 --no-cache
    """
    from tilewise.generate import generate as run

    if int8 and int4:
        raise ConfigurationError("choose one of --int8 and --int4")
    if system and not chat:
        raise ConfigurationError("--system needs --chat")
    if chat and prompt and prompt.endswith(".gguf") and Path(prompt).exists():
        model, prompt = prompt, None
    text_model = _model(model)
    weights = "int8" if int8 else "int4" if int4 else text_model.weights if cache else "float32"
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    settings |= {"weights": weights, "use_cache": cache, "stop": text_model.stops or None}

    def answer(ids: Any, count: int, prefix: str = "", **more: Any) -> _GeneratedText:
        """Generate up to `count` tokens and print them after the prefix."""
        stream = run(text_model.network, ids, count, **settings, **more)
        return _stream_text(stream, text_model, stop or [], prefix, as_json)

    prompt = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if chat:
        generated = _chat(text_model, prompt, system, tokens, answer, cache)
    else:
        prompt = "import " if prompt is None else prompt
        if not prompt:
            raise ConfigurationError("the prompt is empty; give at least one character to continue from")
        ids = text_model.encode(prompt)
        if not as_json:
            _report_prompt(text_model, ids, prompt)
        generated = answer(ids, tokens, prompt)
    rate = len(generated.tokens) / generated.seconds if generated.seconds > 0 else 0.0
    if as_json:
        facts = {"prompt": prompt, "text": generated.text, "tokens": generated.tokens, "tokens_per_second": rate}
        print(json.dumps(facts | {"cache": cache, "interrupted": generated.interrupted}))
    else:
        count = len(generated.tokens)
        print(
            f"\n\n{pluralize(count, 'token')}, {rate:,.0f} a second, "
            f"{'with' if cache else 'without'} a cache, {text_model.kind or weights} weights"
            f"{', interrupted' * generated.interrupted}"
        )
    if generated.interrupted:
        raise typer.Exit(130)


def _chat(
    text_model: _TextModel,
    question: str | None,
    system: str,
    tokens: int,
    answer: Callable[..., _GeneratedText],
    use_cache: bool,
) -> _GeneratedText:
    """Answer one question, or every line that is typed until the input ends; return the last answer.

    The keys and values of the conversation so far are kept, so that an answer costs only the new tokens.
    """
    from tilewise.generate import new_cache

    if text_model.chat_tokens is None:
        raise ConfigurationError("--chat needs a GGUF file: tilewise generate model.gguf --chat")
    messages = [{"role": "system", "content": system}] if system else []
    generated, network = _GeneratedText("", [], 0.0, False), text_model.network
    cache, cached_ids = None, list[int]()
    for line in [question] if question is not None else _typed_lines():
        messages.append({"role": "user", "content": line})
        ids = text_model.chat_tokens(messages)
        count = min(tokens, network.context - len(ids) + 1)
        if count < min(tokens, 1):
            raise ConfigurationError(
                f"the conversation of {len(ids)} tokens is longer than the model's context of {network.context}; "
                "start a new one"
            )
        if use_cache and question is None:
            positions = len(ids) + count
            if cache is None or cache.max_seq_len < min(network.context, positions):
                # Twice as large as now: a growing conversation is seldom computed again.
                cache, cached_ids = new_cache(network, 1, min(network.context, 2 * positions)), []
            equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(cached_ids, ids[:-1], strict=False))))
            generated = answer(ids, count, cache=cache, cached_tokens=equal)
            cached_ids = ids + generated.tokens[:-1]
        else:
            generated = answer(ids, count)
        messages.append({"role": "assistant", "content": generated.text})
        if question is None:
            print()
    return generated


def _typed_lines() -> Iterator[str]:
    """Yield the lines that are typed, without empty ones, until the input ends or Ctrl-C is pressed."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


@dataclass(frozen=True)
class _TextModel:
    """A language model with its tokenizer: text to token ids, and a token id to bytes."""

    network: LanguageModel
    encode: Callable[[str], Any]
    token_bytes: Callable[[int], bytes]
    weights: str = "float32"
    kind: str = ""  # name of the weight format for the report, if it differs from `weights`
    stops: frozenset[int] = frozenset()
    ascii_only: bool = False
    chat_tokens: Callable[[list[dict[str, str]]], list[int]] | None = None  # token ids of a conversation


@dataclass
class _GeneratedText:
    text: str
    tokens: list[int]
    seconds: float
    interrupted: bool


def _stream_text(stream: Any, text_model: _TextModel, stop: list[str], prompt: str, silent: bool) -> _GeneratedText:
    """Collect and print text until the stream ends, a stop word occurs or Ctrl-C is pressed."""
    from tilewise.gguf import TextStream

    out, text, new, interrupted = TextStream(stop), [], list[int](), False

    def write(part: str) -> None:
        """Print and collect a piece of the generated text."""
        text.append(part)
        if not silent:
            sys.stdout.write(part)
            sys.stdout.flush()

    if not silent:
        sys.stdout.write(prompt)
    start = time.perf_counter()
    try:
        for token in stream:
            new.append(int(token))
            write(out.add(text_model.token_bytes(int(token))))
            if out.stopped:
                break
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start
    write(out.end())
    return _GeneratedText("".join(text), new, seconds, interrupted)


def _report_prompt(text_model: _TextModel, ids: Any, prompt: str) -> None:
    """Warn if the model's vocabulary changes the prompt."""
    if not text_model.ascii_only:
        return
    readable_prompt = b"".join(text_model.token_bytes(int(i)) for i in ids).decode()
    if readable_prompt != prompt:
        note = f"The model knows the characters of ASCII only, so it reads the prompt as {readable_prompt!r}."
        typer.echo(note, err=True)


def kv(
    model: Annotated[str, option(_MODEL_HELP)] = "gpt:6x384",
    tokens: Annotated[int, option("Positions to measure.", min=8)] = 200,
    out: Annotated[Path, output_picture(help="File for the picture.")] = Path("out/kv.png"),
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Plot the time per token against its position, with and without the cache (best of three runs each).

    Example: tilewise kv --model gpt:4x128 --tokens 128 --out kv.png
    """
    network = _model(model).network
    if tokens > network.context:
        raise ConfigurationError(f"--tokens {tokens} is more than the model's context of {network.context}")
    cached, uncached = _seconds_per_token(network, tokens, True), _seconds_per_token(network, tokens, False)
    _draw(cached, uncached, model, out)
    ratio = sum(uncached) / sum(cached)
    if as_json:
        print(json.dumps({"cached_s": cached, "uncached_s": uncached, "speedup": ratio, "picture": str(out)}))
    else:
        summary = f"{sum(cached):.3f} s with the cache, {sum(uncached):.3f} s without ({ratio:.1f}×)"
        print(f"{pluralize(tokens, 'token')}: {summary}")
        where = f"; picture in {out}" if can_draw() else ""
        print(f"last token: {cached[-1] * 1e3:.2f} ms with, {uncached[-1] * 1e3:.2f} ms without{where}")


def _model(name: str) -> _TextModel:
    """Load a language model by name (gpt, gpt:6x384) or from a file, with its tokenizer."""
    from tilewise import data, models
    from tilewise.generate import load_gpt

    if name == "gpt":
        return _character_model(models.pretrained("gpt"))
    if name.startswith("gpt:"):
        return _character_model(models.gpt(name[4:], vocab=len(data.VOCABULARY)))
    if not Path(name).exists():
        raise ConfigurationError(f"there is no model {name!r}; use {_MODEL_HELP.rstrip('.')}")
    if name.endswith(".gguf"):
        return _from_gguf(name)
    network = load_gpt(name)
    return _character_model(network) if network.vocab == len(data.VOCABULARY) else _token_id_model(network)


def _character_model(network: LanguageModel) -> _TextModel:
    """Pair a model of characters with the encoding that it was trained with."""
    from tilewise import data

    return _TextModel(network, data.encode, lambda token: data.decode([token]).encode(), ascii_only=True)


def _token_id_model(network: LanguageModel, **more: Any) -> _TextModel:
    return _TextModel(network, _parse_token_ids, lambda token: f" {token}".encode(), **more)


def _from_gguf(path: str) -> _TextModel:
    """Load a GGUF file; without a tokenizer in it, prompts are token ids."""
    from tilewise.gguf import load_gguf

    loaded = load_gguf(path)
    facts: dict[str, Any] = {"weights": loaded.weights, "kind": loaded.kind}
    if loaded.tokenizer is None:
        return _token_id_model(loaded.model, **facts)
    words = loaded.tokenizer
    facts |= {"stops": words.stops, "chat_tokens": loaded.chat_tokens}
    return _TextModel(loaded.model, words.encode, words.token_bytes, **facts)


def _parse_token_ids(prompt: str) -> list[int]:
    """Parse a prompt of token ids, separated by spaces or commas."""
    try:
        return [int(part) for part in prompt.replace(",", " ").split()]
    except ValueError:
        raise ConfigurationError("this model's prompt is a list of token ids, such as '464 3290'") from None


def _seconds_per_token(network: LanguageModel, tokens: int, cache: bool) -> list[float]:
    """Return the shortest of three times per position, which filters out interference by other programs."""
    return [min(times) for times in zip(*(_times_of_run(network, tokens, cache) for _ in range(3)), strict=True)]


def _times_of_run(network: LanguageModel, tokens: int, cache: bool) -> list[float]:
    """Generate `tokens` tokens once; return the seconds that each one took."""
    from tilewise.generate import generate as run

    stream, times = run(network, [0], tokens, use_cache=cache), []
    start = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return times


def _draw(cached: list[float], uncached: list[float], model: str, out: Path) -> None:
    """Draw the time per token with and without the KV cache."""
    from tilewise.cli.pictures import BLUE, RED, picture

    with picture(out) as axes:
        for seconds, label, colour in ((uncached, "without the cache", RED), (cached, "with the cache", BLUE)):
            axes.plot(range(1, len(seconds) + 1), [s * 1e3 for s in seconds], color=colour, label=label)
        title = f"Time of one token, {model}"
        axes.set(xlabel="position of the token", ylabel="milliseconds (logarithmic)", yscale="log", title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
        axes.grid()
