"""What PyTorch's compiler calls: its class of choices with tilewise inside. Imported by `enable()` and by nobody else.

Whatever goes wrong in here, PyTorch gets its own choices and the reason is noted once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.choices import InductorChoices

from tilewise.inductor.records import Book
from tilewise.inductor.templates import config_of, keep, problem_of
from tilewise.tune.choose.service import ServiceClient
from tilewise.tune.families.triton.product import LIBRARY
from tilewise.tune.families.triton.runtimes import Runtimes
from tilewise.tune.measure.store import Machine
from tilewise.tune.problem import Config, Problem


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
        self.notes: list[str] = []
        self.started: dict[str, float] = {}

    @property
    def key(self) -> str:
        """What decides the choices: the compiler's caches are kept apart by it."""
        text = f"{self.model.metadata.get('digest', '')}:{self.budget}"
        return "tilewise-" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def keep(self, found: list[Any], inputs: Any, op: str) -> list[Any]:
        """Of PyTorch's choices, those worth measuring."""
        problem = self.problem(op, inputs)
        if problem is None:
            return found
        templates = [str(choice.template.uid) for choice in found]
        parameters = [choice.params.to_kwargs() for choice in found]
        best = self.book.best(problem)
        elsewhere = self._measured_elsewhere(problem) if best is None else None
        kept = keep(self.model, problem, (templates, parameters), self.budget, best or elsewhere)
        why = "measured elsewhere" if elsewhere is not None and kept.why == "remembered" else kept.why
        self.book.decided(problem, why, kept.considered, len(kept.places), kept.seconds)
        self.started[problem.key] = time.monotonic()
        return [found[place] for place in kept.places]

    def _measured_elsewhere(self, problem: Problem) -> Config | None:
        """The fastest that others measured with this PyTorch; None where there is none, or no answer in time."""
        found = None if self.service is None else self.service.choose(_with_version(problem), None)
        return found.config if found is not None and found.source == "measured" else None

    def problem(self, op: str, inputs: Any) -> Problem | None:
        if inputs.device_type not in self.devices:
            return None
        left, right = inputs.mat1mat2()
        shapes, strides = inputs.shapes_hinted(), inputs.strides_hinted()
        nodes = list(inputs.nodes())
        i, j = nodes.index(left), nodes.index(right)
        return problem_of(op, (shapes[i], strides[i]), (shapes[j], strides[j]), str(left.get_dtype()))

    def measured(self, timings: Any, op: str, nodes: Sequence[Any], *_: Any) -> None:
        """PyTorch's feedback: milliseconds of each choice."""
        try:
            problem, rows = self._rows(timings, op, nodes)
            if problem is not None:
                started = self.started.pop(problem.key, None)
                self.book.measured(problem, rows, time.monotonic() - started if started is not None else 0.0)
                if self.service is not None and rows:
                    times = {config: seconds * 1e9 for config, seconds in rows}
                    default_ns = times.get(LIBRARY, min(times.values()))
                    self.service.report(_with_version(problem), default_ns, list(times.items()))
        except Exception as error:  # a record that cannot be made must not cost a compilation
            self.note(error)

    def _rows(self, timings: Any, op: str, nodes: Sequence[Any]) -> tuple[Problem | None, list[tuple[Config, float]]]:
        left, right = nodes[-2:]
        sides = [([int(n) for n in node.get_size()], [int(n) for n in node.get_stride()]) for node in (left, right)]
        problem = problem_of(op, sides[0], sides[1], str(left.get_dtype()))
        rows = []
        for choice, milliseconds in timings.items():
            made = getattr(choice, "annotations", {}).get("ktc")
            config = config_of(str(made.template.uid), made.params.to_kwargs()) if made is not None else None
            if config is not None and 0 < milliseconds < float("inf"):
                rows.append((config, milliseconds * 1e-3))
        return problem, rows

    def note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self.notes:
            self.notes.append(text)


class TilewiseChoices(InductorChoices):
    """PyTorch's choices of templates for matrix products, the promising ones alone."""

    advisor: Advisor | None = None  # of the last `enable()`; the compiler makes instances as it likes

    def uuid(self) -> str:
        """In the compiler's cache key from PyTorch 2.13 on."""
        return self.advisor.key if self.advisor is not None else "tilewise"

    def _finalize_template_configs(self, template_choices: Any, kernel_inputs: Any, *rest: Any, **named: Any) -> Any:
        found = super()._finalize_template_configs(template_choices, kernel_inputs, *rest, **named)
        op = named.get("op_name", rest[1] if len(rest) > 1 else "")
        if self.advisor is None:
            return found
        try:
            return self.advisor.keep(found, kernel_inputs, op)
        except Exception as error:  # PyTorch's own choices are always right, if slower to try
            self.advisor.note(error)
            return found


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
