"""Targets of `tilewise profile`: a model by name, a saved model or ONNX file, or a Python script."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, TilewiseError, did_you_mean
from tilewise.nn.self_planning import layer_by_layer

MODELS = ("mlp", "cnn", "vgg6", "resnet8", "gpt")


@dataclass(frozen=True)
class Target:
    """A model, its inputs, and a function that calls the model once: as a plan, or layer by layer."""

    name: str
    model: Any
    inputs: list[Any]
    call: Callable[[], Any]
    is_planned: bool = False

    def planned(self) -> Target:
        """Return the target with a plan in place of the model; the target itself if the model cannot be planned."""
        import tilewise

        try:
            plan = tilewise.compile(self.model, *self.inputs)
        except TilewiseError:
            return self
        return replace(self, call=lambda: plan(*self.inputs), is_planned=True)


def model_target(
    name: str,
    batch: int | None = None,
    backward: bool = False,
    tokens: int = 128,
    seed: int = 0,
    make_inputs: Callable[[Any], list[Any]] | None = None,
) -> Target:
    """Load a reference model ("cnn", "gpt:6x384") or a saved file, with a random batch of matching inputs.

    A batch is 32 if it is not given; that of an ONNX file is what the file says, else 1. `make_inputs` creates the
    inputs of an ONNX network.
    """
    from tilewise import Tensor, models, onnx
    from tilewise.models.zoo import ZOO

    if name.endswith(".onnx"):
        network = onnx.load(name)
        inputs = make_inputs(network) if make_inputs else network.example(batch, seed, free=tokens)
        return _target(name, network, inputs, backward)
    batch = 32 if batch is None else batch
    if batch < 1 or tokens < 1:
        raise ConfigurationError(f"batch and tokens must be at least 1, not {batch} and {tokens}")
    kind, _, size = name.partition(":")
    if kind == "gpt":
        model: Any = models.gpt(size or "4x128", seed=seed)
    elif kind in MODELS and not size:
        model = getattr(models, kind)(seed=seed)
    elif name in ZOO:
        model = ZOO[name](seed=seed)
    elif name.endswith(".py"):
        raise ConfigurationError(f"{name} is a Python program, not a model; profile it with --script {name}")
    elif Path(name).is_file():
        from tilewise.models.saved import load_saved

        kind, model = load_saved(name)
    else:
        hint = did_you_mean(name, [*MODELS, "gpt:6x384", *ZOO])
        raise ConfigurationError(f"{name!r} is neither a model nor a saved or ONNX file; {hint}")
    x = _input_for(kind, model, batch, tokens, np.random.default_rng(seed))
    return _target(name, model, [Tensor(x) if x.dtype.kind == "f" else x], backward)


def _target(name: str, model: Any, inputs: list[Any], backward: bool) -> Target:
    """Combine a model and its inputs to a target whose call includes the backward pass if `backward`."""
    from tilewise import no_grad

    model.train(backward)

    def call() -> Any:
        """Run the model once and, if requested, the backward pass of the sum of its result."""
        if backward:
            model.zero_grad()
            result = model(*inputs)
            return sum(t.sum() for t in (result.values() if isinstance(result, dict) else [result])).backward()
        with no_grad(), layer_by_layer():
            return model(*inputs)

    return Target(name, model, inputs, call)


def _input_for(kind: str, model: Any, batch: int, tokens: int, rng: np.random.Generator) -> Any:
    """Draw random inputs for a kind of model: token ids for language models, else float32 features or images."""
    shape = getattr(model, "example_shape", None)  # only models of the zoo have it
    if shape is not None:
        vocab = getattr(model, "vocab", None)
        return rng.integers(0, vocab, (batch, *shape)) if vocab else rng.random((batch, *shape), np.float32)
    if kind == "gpt":
        return rng.integers(0, model.vocab, (batch, min(tokens, model.context)))
    if kind == "mlp":
        return rng.random((batch, model[0].in_features), dtype=np.float32)
    if kind == "cnn":
        size = 4 * round((model[12].in_features / 64) ** 0.5)
        return rng.random((batch, model[0].in_channels, size, size), dtype=np.float32)
    return rng.random((batch, 3, 32, 32), dtype=np.float32)


@dataclass(frozen=True)
class ScriptExit:
    """Exit code of a script, with a sentence for the user unless the script ran to its end."""

    exit_code: int = 0
    note: str = ""


def run_script(path: Path, arguments: list[str]) -> ScriptExit:
    """Run a Python file as `__main__` with these arguments; return its exit code."""
    if not path.is_file():
        raise ConfigurationError(f"there is no script {path}")
    saved = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except KeyboardInterrupt:
        return ScriptExit(130, f"{path} was interrupted; the report covers what ran")  # 128 + SIGINT
    except SystemExit as error:
        return _exit_status(path, error.code)
    except TilewiseError as error:
        raise ConfigurationError(f"{path}{_line_in(path, error)}: {error}") from None
    except BrokenPipeError:  # the reader of its output, such as `head`, has exited
        raise
    except Exception as error:
        raise ConfigurationError(f"{path}{_line_in(path, error)} raised {type(error).__name__}: {error}") from None
    finally:
        sys.argv, sys.path[:] = saved
    return ScriptExit()


def _exit_status(path: Path, code: object) -> ScriptExit:
    """Convert the argument of `sys.exit` to an exit code: None is 0, an int is itself, anything else is 1."""
    if code is None or code == 0:
        return ScriptExit()
    if isinstance(code, int):
        return ScriptExit(code & 0xFF, f"{path} ended with exit code {code}")
    return ScriptExit(1, f"{path} ended with exit code 1, saying: {code}")


def _line_in(path: Path, error: BaseException) -> str:
    """Return the last line of file `path` in an error's traceback, as " line 12"; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    return f" line {frames[-1].lineno}" if frames else ""
