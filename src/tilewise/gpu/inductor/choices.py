"""What PyTorch's compiler calls: its class of choices with tilewise inside. Imported by `enable()` and by nobody else.

Whatever goes wrong in here, PyTorch gets its own choices and the reason is noted once.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from tilewise.gpu.inductor.attention import attention_problem, likely
from tilewise.gpu.inductor.fair import retime
from tilewise.gpu.inductor.following import fuses_next
from tilewise.gpu.inductor.processes import start_anew, start_early
from tilewise.gpu.inductor.records import Book
from tilewise.gpu.inductor.rest import in_registers
from tilewise.gpu.inductor.templates import (
    NO_CHOICE,
    OPERATIONS,
    Asked,
    Kept,
    config_of,
    keep,
    pass_seconds,
    problem_of,
)
from tilewise.gpu.products.family import LIBRARY
from tilewise.gpu.products.runtimes import Runtimes
from tilewise.store.problem import Config, Problem
from tilewise.store.service import ServiceClient
from tilewise.store.store import Machine

_RULES = 4  # counted up where the same model and budget would now give other kernels
_TIMED = ("convolution", "flex_attention")  # again, though not remembered: PyTorch's own caches do that


class Unranked(Exception):
    """A list of templates that tilewise can say nothing about: PyTorch makes another, as it would without tilewise."""


class Advisor:
    """The model, the budget, the records, and what was decided for products that are about to be measured. `service`
    is asked for what other machines measured, and told what this one did."""

    def __init__(
        self,
        model: Runtimes,
        budget: int,
        book: Book,
        devices: Sequence[str] = ("cuda",),
        service: ServiceClient | None = None,
    ) -> None:
        self.model, self.budget, self.book, self.devices = model, budget, book, tuple(devices)
        self.service = service
        self.isolated = False  # whether a process of PyTorch's tries every template first
        self.without: dict[str, Any] = {}  # the compiler's settings as they would be without tilewise
        self._started_early = False
        self.notes: list[str] = []
        self.started: dict[str, float] = {}
        self._library_listed: str | None = None  # the problem whose ATen call was in a list of its own just now

    @property
    def key(self) -> str:
        """What decides the choices: the compiler's caches are kept apart by it."""
        text = f"{self.model.metadata.get('digest', '')}:{self.budget}:{_RULES}"
        return "tilewise-" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def keep(self, found: list[Any], inputs: Any, op: str) -> list[Any]:
        """Of PyTorch's choices, those worth measuring."""
        problem = self.problem(op, inputs)
        if problem is None:
            return found
        templates = [str(choice.template.uid) for choice in found]
        if all(name.startswith("aten") for name in templates):
            self._library_listed = problem.key
            return found
        kept = self._kept(problem, (templates, [choice.params.to_kwargs() for choice in found]))
        if kept.why == NO_CHOICE:
            raise Unranked
        self._decided(problem, kept)
        self.started[problem.key] = time.monotonic()
        return [found[place] for place in kept.places]

    def _decided(self, problem: Problem, kept: Kept) -> None:
        """Write it down; where something is going to be measured, the process that tries it starts meanwhile."""
        self.book.decided(problem, kept.why, kept.considered, len(kept.places), kept.seconds)
        if self.isolated and "cuda" in self.devices and not self._started_early and kept.why == "measured":
            self._started_early = True
            start_early()

    def _kept(self, problem: Problem, choices: tuple[list[str], list[dict[str, Any]]]) -> Kept:
        saved = pass_seconds(problem) if fuses_next(getattr(V.graph, "current_node", None)) else 0.0
        listed, self._library_listed = self._library_listed == problem.key, None
        best = self.book.best(problem)
        elsewhere = self._measured_elsewhere(problem) if best is None else None
        kept = keep(self.model, problem, choices, self.budget, Asked(best or elsewhere, saved, listed))
        return replace(kept, why="measured elsewhere") if elsewhere and kept.why == "remembered" else kept

    def _measured_elsewhere(self, problem: Problem) -> Config | None:
        """The fastest that others measured with this PyTorch; None where there is none, or no answer in time."""
        found = None if self.service is None else self.service.choose(_with_version(problem), None)
        return found.config if found is not None and found.source == "measured" else None

    def problem(self, op: str, inputs: Any) -> Problem | None:
        if op not in OPERATIONS or inputs.device_type not in self.devices:
            return None
        left, right = inputs.mat1mat2()
        shapes, strides = inputs.shapes_hinted(), inputs.strides_hinted()
        nodes = list(inputs.nodes())
        i, j = nodes.index(left), nodes.index(right)
        return problem_of(op, (shapes[i], strides[i]), (shapes[j], strides[j]), str(left.get_dtype()))

    def pytorchs(self) -> dict[str, Any]:
        """What is set while PyTorch lists templates that are not ranked here: what would be without tilewise. Where the
        user left ATen out, and it is not listed, templates have to be."""
        without_aten = "ATEN" not in config.max_autotune_gemm_backends.upper()
        return {**self.without, "max_autotune_gemm": without_aten or self.without["max_autotune_gemm"]}

    def attention(self, usual: Any, tuned: list[Any], node: Any) -> list[Any]:
        """PyTorch's usual tiling of flexible attention, and the most promising of those that it tunes among; the first
        of these alone where it is well ahead, and none where there is nothing to say."""
        start, problem = time.perf_counter(), attention_problem(node)
        if problem is None:
            return []
        listed = [usual, *(one for one in tuned if one != usual)]
        places, sure = likely(problem, _flex(usual), [_flex(one) for one in listed[1:]], self.budget)
        kept = (1 + places[0],) if sure else (0, *(1 + place for place in places))
        seconds = time.perf_counter() - start
        self._decided(problem, Kept(kept, "sure" if sure else "measured", len(listed), seconds))
        return [listed[place] for place in kept]

    def convolution(self, configs: list[Any], sizes: tuple[int, int, int], dtype: str) -> list[Any]:
        """Of the templates for a convolution, the best by the product that it amounts to. Without a model those that
        PyTorch would list without tilewise: none beside ATen's where it would not tune."""
        m, n, k = sizes
        problem = problem_of("mm", ((m, k), (k, 1)), ((k, n), (n, 1)), dtype)
        if problem is None:
            tunes = config.max_autotune or self.without["max_autotune_gemm"]
            return configs if tunes or "ATEN" not in config.max_autotune_conv_backends.upper() else []
        parameters = [{**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages} for c in configs]
        asked = Asked(saved=math.inf, library_elsewhere=True)
        kept = keep(self.model, problem, (["triton::conv"] * len(configs), parameters), self.budget, asked)
        return [configs[place] for place in kept.places]

    def measured(self, timings: Any, op: str, nodes: Sequence[Any], *_: Any) -> None:
        """PyTorch's feedback: milliseconds of each choice. They are taken again as a program has them, and PyTorch
        chooses by those."""
        try:
            if self.isolated and not all(map(math.isfinite, timings.values())):
                start_anew()
            problem, configs = self._configs(timings, op, nodes)
            if problem is None and op not in _TIMED:
                return
            if "cuda" in self.devices:
                timings.update(retime(torch, timings))
            if problem is not None:
                self._record(problem, [(of, timings[choice] * 1e-3) for choice, of in configs.items()])
        except Exception as error:  # a record that cannot be made must not cost a compilation
            self.note(error)

    def _record(self, problem: Problem, rows: list[tuple[Config, float]]) -> None:
        rows = [(config, seconds) for config, seconds in rows if 0 < seconds < math.inf]
        started = self.started.pop(problem.key, None)
        self.book.measured(problem, rows, time.monotonic() - started if started is not None else 0.0)
        if self.service is not None and rows:
            times = {config: seconds * 1e9 for config, seconds in rows}
            default_ns = times.get(LIBRARY, min(times.values()))
            self.service.report(_with_version(problem), default_ns, list(times.items()))

    def _configs(self, timings: Any, op: str, nodes: Sequence[Any]) -> tuple[Problem | None, dict[Any, Config]]:
        left, right = nodes[-2:]
        sides = [([int(n) for n in node.get_size()], [int(n) for n in node.get_stride()]) for node in (left, right)]
        problem = problem_of(op, sides[0], sides[1], str(left.get_dtype()))
        found = {}
        for choice in timings if problem is not None else ():
            made = getattr(choice, "annotations", {}).get("ktc")
            of = config_of(str(made.template.uid), made.params.to_kwargs()) if made is not None else None
            if of is not None:
                found[choice] = of
        return problem, found

    def note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self.notes:
            self.notes.append(text)


class TilewiseChoices(InductorChoices):
    """PyTorch's choices of templates, the promising ones alone."""

    advisor: Advisor | None = None  # of the last `enable()`; the compiler makes instances as it likes

    def uuid(self) -> str:
        """In the compiler's cache key from PyTorch 2.13 on."""
        return self.advisor.key if self.advisor is not None else "tilewise"

    def get_template_configs(self, kernel_inputs: Any, templates: Any, op_name: str, *rest: Any, **named: Any) -> Any:
        """The long list is for ranking: of a product that tilewise has no model for (other number types, 8-bit numbers)
        or nothing to say about, PyTorch lists what it would list without tilewise."""
        given = (kernel_inputs, templates, op_name, *rest)
        advisor = self.advisor
        if advisor is None:
            return super().get_template_configs(*given, **named)
        if self._or_pytorchs(False, lambda advisor: advisor.problem(op_name, kernel_inputs) is not None):
            with contextlib.suppress(Unranked), self._listing(True):
                return super().get_template_configs(*given, **named)
        with config.patch(advisor.pytorchs()), self._listing(False):
            return super().get_template_configs(*given, **named)

    _ranks: bool | None = None  # the list that PyTorch is making; None outside of `get_template_configs`

    @contextlib.contextmanager
    def _listing(self, ranks: bool) -> Iterator[None]:
        before, self._ranks = self._ranks, ranks
        try:
            yield
        finally:
            self._ranks = before

    def _finalize_template_configs(self, template_choices: Any, kernel_inputs: Any, *rest: Any, **named: Any) -> Any:
        found = super()._finalize_template_configs(template_choices, kernel_inputs, *rest, **named)
        op = named.get("op_name", rest[1] if len(rest) > 1 else "")
        advisor = self.advisor
        if advisor is None or self._ranks is False:
            return found
        try:
            return advisor.keep(found, kernel_inputs, op)
        except Exception as error:
            if not isinstance(error, Unranked):
                advisor.note(error)
            if self._ranks:  # a list of a thousand, which nobody is to measure
                raise Unranked from error
            return found

    def get_flex_attention_fwd_configs(self, head_dim: int, dtype: Any, device_type: str | None = "cuda") -> Any:
        found = super().get_flex_attention_fwd_configs(head_dim, dtype, device_type)

        def advised(advisor: Advisor) -> Any:
            # Of the exhaustive list the model would take deeper pipelines, which never were the fastest.
            tuned = self.get_config_heuristics(device_type).flex_attn_fwd_autotune_configs
            with config.patch(max_autotune=False):  # PyTorch's one for those who do not tune
                (usual,) = InductorChoices.get_flex_attention_fwd_configs(self, head_dim, dtype, device_type)
            return advisor.attention(usual, tuned, V.graph.current_node) or found

        return self._or_pytorchs(found, advised)

    def get_conv_configs(self, device_type: str | None = "cuda") -> Any:
        listed: Callable[..., Any] = super().get_conv_configs(device_type)

        def advised(m: Any, n: Any, k: Any, **more: Any) -> Any:
            found = list(listed(m, n, k, **more))
            return self._or_pytorchs(found, lambda advisor: advisor.convolution(found, *_as_product(m, n)))

        return advised if device_type in (self.advisor.devices if self.advisor else ()) else listed

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a sum keeps its rows in registers: longer ones than PyTorch would, too."""
        usual, advisor = InductorChoices.should_use_persistent_reduction, TilewiseChoices.advisor
        try:
            if advisor is not None and not cooperative_reduction and in_registers(features, advisor.devices):
                return True
        except Exception as error:
            if advisor is not None:
                advisor.note(error)
        return bool(usual(features, cooperative_reduction))

    def _or_pytorchs(self, found: Any, advised: Callable[[Advisor], Any]) -> Any:
        """PyTorch's own choices are always right, if slower to try."""
        if self.advisor is None:
            return found
        try:
            return advised(self.advisor)
        except Exception as error:
            self.advisor.note(error)
            return found


def _as_product(m: Any, n: Any) -> tuple[tuple[int, int, int], str]:
    """The sizes of the product that the convolution at hand amounts to, and its number type."""
    node: Any = V.graph.current_node
    weight = node.args[1].meta["val"]  # (out, in, *kernel)
    return (int(m), int(n), math.prod(int(size) for size in weight.shape[1:])), str(weight.dtype)


def _flex(tiling: Any) -> Config:
    return Config.of(block_m=tiling.block_m, block_n=tiling.block_n, warps=tiling.num_warps, stages=tiling.num_stages)


def gpu() -> Machine:
    """The GPU as a service knows it, by the name that its other measurements have."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return Machine("triton", name, {"name": name})


def machine_name() -> str:
    """The GPU and the versions that a measured choice holds for."""
    return f"{gpu().identity}, PyTorch {torch.__version__}"


def _with_version(problem: Problem) -> Problem:
    """The problem as a service is told of it: another PyTorch has other templates."""
    return Problem({**problem, "pytorch": str(torch.__version__)})
