"""The handler that PyTorch's compiler asks for template choices, with tilewise's selection inside.

Only `enable()` imports this module. Whatever fails in here, PyTorch gets its own choices and the error is noted once.
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

from tilewise.gpu.inductor.decision_log import DecisionLog
from tilewise.gpu.inductor.patch import restart_test_process, start_test_process
from tilewise.gpu.inductor.rebenchmark import fits_registers, rebenchmark
from tilewise.gpu.inductor.templates import (
    FAMILY,
    OPERATIONS,
    Context,
    Reason,
    Selection,
    attention_problem,
    config_of,
    epilogue_seconds,
    has_fusible_epilogue,
    problem_of,
    rank_attention,
    select_templates,
)
from tilewise.gpu.pinning import active_lock, is_unmeasured
from tilewise.gpu.pinning.lock import LockedChoice, MissingChoiceError
from tilewise.gpu.products.roofline import CUBLAS, is_cublas
from tilewise.gpu.products.runtime_model import RuntimeModel
from tilewise.store.problem import Config, Machine, Problem
from tilewise.store.service import ServiceClient

_RULES_VERSION = 5  # increase it when the same model and budget select other templates than before
# Operations that are benchmarked again but not stored: PyTorch's own caches remember them.
_REBENCHMARKED = ("convolution", "flex_attention")


class UnrankedError(Exception):
    """Raised for a list of templates that tilewise cannot rank; PyTorch then lists what it would without tilewise."""


class Advisor:
    """Selects templates with a runtime model and a budget, and records the decisions and the measurements.

    `service` is asked for what other machines measured and receives what this one measures.
    """

    def __init__(
        self,
        model: RuntimeModel,
        budget: int,
        log: DecisionLog,
        devices: Sequence[str] = ("cuda",),
        service: ServiceClient | None = None,
    ) -> None:
        """Start without decisions; a budget of 0 never benchmarks."""
        self.model, self.budget, self.log, self.devices = model, budget, log, tuple(devices)
        self.service = service
        self.isolated = False  # whether a process of PyTorch's tests every template first
        self.original_settings: dict[str, Any] = {}  # the compiler's settings without tilewise
        self.notes: list[str] = []  # distinct errors
        self._test_process_running = False
        self._compile_start: dict[str, float] = {}  # time of the selection, by problem
        self._aten_list: str | None = None  # key of the problem whose ATen call was in the previous list
        self._keep_alive: list[Any] = []  # the objects behind `pinned_templates`, so that no identity is reused
        self.pinned_templates: set[int] = set()  # identities of the listed choices that were made unmeasured

    @property
    def key(self) -> str:
        """Hash everything that selections depend on, to separate entries of the compiler's caches."""
        lock = active_lock()
        choices = lock.digest if lock is not None else ""
        budget = 0 if self.is_unmeasured else self.budget
        text = f"{self.model.digest}:{budget}:{_RULES_VERSION}:{choices}"
        return "tilewise-" + hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_unmeasured(self) -> bool:
        """Whether no template may be benchmarked: no budget, `tilewise.pin()` or deterministic algorithms."""
        return not self.budget or is_unmeasured()

    # Selecting

    def select(self, choices: list[Any], inputs: Any, op: str) -> list[Any]:
        """Return the candidates of PyTorch's list for the product `op` that are worth benchmarking."""
        problem = self.problem(op, inputs)
        if problem is None:
            return choices
        templates = [str(choice.template.uid) for choice in choices]
        # PyTorch may list ATen alone first and the templates afterwards; a list of ATen alone is not reduced.
        if all(name.startswith("aten") for name in templates):
            self._aten_list = problem.key
            return choices
        selection = self._select(problem, (templates, [choice.params.to_kwargs() for choice in choices]))
        if selection.reason is Reason.NO_MODEL:
            raise UnrankedError
        self._record_selection(problem, selection)
        self._compile_start[problem.key] = time.monotonic()
        selected = [choices[i] for i in selection.indices]
        if selection.reason is Reason.PINNED:
            self.pinned_templates |= {id(choice) for choice in selected}
            self._keep_alive += selected
        return selected

    def _select(self, problem: Problem, choices: tuple[list[str], list[dict[str, Any]]]) -> Selection:
        """Select templates by predictions and earlier measurements; `choices` are template names and parameters."""
        fusible = has_fusible_epilogue(getattr(V.graph, "current_node", None))
        aten_elsewhere, self._aten_list = self._aten_list == problem.key, None
        if self.is_unmeasured:
            advantage = epilogue_seconds(problem) if fusible else 0.0
            return self._select_unmeasured(problem, choices, advantage, aten_elsewhere)
        # This machine's own measurement comes before the service's.
        best = self.log.best(problem)
        elsewhere = None
        if best is None and self.service is not None:
            answer = self.service.choose(_with_version(problem), None)  # None without an answer in time
            elsewhere = answer.config if answer is not None and answer.source == "measured" else None
        context = Context(best or elsewhere, epilogue_seconds(problem) if fusible else 0.0, aten_elsewhere)
        selection = select_templates(self.model, problem, choices, self.budget, context)
        if elsewhere and selection.reason is Reason.EARLIER_WINNER:
            return replace(selection, reason=Reason.SERVICE)
        return selection

    def _select_unmeasured(
        self, problem: Problem, choices: tuple[list[str], list[dict[str, Any]]], advantage: float, aten_elsewhere: bool
    ) -> Selection:
        """Select one candidate: the lock file's, else the predicted fastest; `advantage` is in seconds.
        A new selection enters the lock file. `aten_elsewhere`: ATen is in another list of the compiler.

        `advantage` are the seconds that a fused epilogue saves; `aten_elsewhere`: another list contains ATen's call.
        """
        lock, device = active_lock(), current_gpu().identity
        kernel = f"{FAMILY}.{problem.word('op')}"
        # A template that fuses the next operation competes under other conditions, so it is a separate problem.
        values = {name: value for name, value in problem.items() if name != "family"}
        key = Problem({**values, "fuses": int(advantage > 0)})
        locked = None if lock is None else lock.find(kernel, key, device)
        if locked is not None:
            selection = select_templates(
                self.model, problem, choices, 0, Context(locked.config, advantage, aten_elsewhere)
            )
            if selection.reason is Reason.EARLIER_WINNER:
                return replace(selection, reason=Reason.PINNED)
        selection = select_templates(self.model, problem, choices, 0, Context(None, advantage, aten_elsewhere))
        if lock is not None and selection.reason is Reason.PINNED:
            names, parameters = choices
            configs = {i: config_of(names[i], parameters[i]) for i in {*selection.indices, *selection.candidates}}
            config_or_none = configs[selection.indices[0]] if selection.indices else CUBLAS
            is_aten = config_or_none is None or is_cublas(config_or_none)
            lock.add(
                LockedChoice(
                    kernel=kernel,
                    problem=key,
                    device=device,
                    config=CUBLAS if config_or_none is None else config_or_none,
                    predicted=selection.predicted,
                    model=f"products {self.model.digest}",
                    reason=f"{'ATen' if is_aten else 'first'} of {selection.considered} by the cost model",
                    candidates=tuple(c for i in selection.candidates if (c := configs[i]) is not None),
                )
            )
        return selection

    def _record_selection(self, problem: Problem, selection: Selection) -> None:
        """Log a selection; if it will be benchmarked, start the process that test-runs templates."""
        self.log.add_decision(problem, selection)
        starts = self.isolated and "cuda" in self.devices and selection.reason is Reason.BENCHMARK
        if starts and not self._test_process_running:
            self._test_process_running = True
            start_test_process()

    def problem(self, op: str, inputs: Any) -> Problem | None:
        """Describe a product from Inductor's kernel inputs as a `Problem`; None if the model does not cover it."""
        if op not in OPERATIONS or inputs.device_type not in self.devices:
            return None
        left, right = inputs.mat1mat2()
        shapes, strides = inputs.shapes_hinted(), inputs.strides_hinted()
        nodes = list(inputs.nodes())
        i, j = nodes.index(left), nodes.index(right)
        return problem_of(op, (shapes[i], strides[i]), (shapes[j], strides[j]), str(left.get_dtype()))

    def settings_without_ranking(self) -> dict[str, Any]:
        """Return the compiler settings for lists that tilewise does not rank: the user's original ones.

        If the user excluded ATen, templates must be listed, because ATen is not.
        """
        without_aten = "ATEN" not in config.max_autotune_gemm_backends.upper()
        return {
            **self.original_settings,
            "max_autotune_gemm": without_aten or self.original_settings["max_autotune_gemm"],
        }

    def select_attention(self, default: Any, tilings: list[Any], node: Any) -> list[Any]:
        """Return the tilings of flexible attention to benchmark: PyTorch's default and the most promising others.

        A tiling that is predicted well ahead is returned alone. The result is empty if there is no model.
        """
        start, problem = time.perf_counter(), attention_problem(node)
        if problem is None:
            return []
        candidates = [default, *(tiling for tiling in tilings if tiling != default)]
        configs = [
            Config.of(block_m=t.block_m, block_n=t.block_n, warps=t.num_warps, stages=t.num_stages) for t in candidates
        ]
        ranking, is_certain = rank_attention(problem, configs[0], configs[1:], max(self.budget, 1))
        if self.is_unmeasured:  # only a tiling that is certain replaces the default
            ranking = ranking[:1] if is_certain else []
        indices = (1 + ranking[0],) if is_certain else (0, *(1 + i for i in ranking))
        seconds = time.perf_counter() - start
        reason = Reason.CERTAIN if is_certain else Reason.BENCHMARK
        self._record_selection(problem, Selection(indices, reason, len(candidates), seconds))
        return [candidates[i] for i in indices]

    def select_convolution(self, configs: list[Any], sizes: tuple[int, int, int], dtype: str) -> list[Any]:
        """Return a convolution's best templates, ranked as the equivalent matrix product with `sizes` (m, n, k).

        Without a model for it PyTorch lists what it would without tilewise: only ATen unless it autotunes.
        """
        m, n, k = sizes
        problem = problem_of("mm", ((m, k), (k, 1)), ((k, n), (n, 1)), dtype)
        if problem is None:
            autotunes = config.max_autotune or self.original_settings["max_autotune_gemm"]
            return configs if autotunes or "ATEN" not in config.max_autotune_conv_backends.upper() else []
        parameters = [{**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages} for c in configs]
        # PyTorch adds ATen's convolution itself, so templates are only ranked and never rejected.
        context = Context(epilogue_seconds=math.inf, aten_elsewhere=True)
        choices = ["triton::conv"] * len(configs), parameters
        # cuDNN's time is not predicted, so an unmeasured template cannot be compared with it.
        if self.is_unmeasured and "ATEN" in config.max_autotune_conv_backends.upper():
            return []
        selection = select_templates(self.model, problem, choices, self.budget, context)
        return [configs[i] for i in selection.indices]

    # Measuring

    def on_feedback(self, timings: Any, op: str, nodes: Sequence[Any], *_: Any) -> None:
        """Replace PyTorch's milliseconds in `timings` by times measured again, interleaved, and record those."""
        try:
            # A template that failed may have corrupted the CUDA context of the test process.
            if self.isolated and not all(map(math.isfinite, timings.values())):
                restart_test_process()
            problem, configs = self._configs(timings, op, nodes)
            if problem is None and op not in _REBENCHMARKED:
                return
            # PyTorch chooses by the values of this dictionary after the callback.
            if "cuda" in self.devices:
                timings.update(rebenchmark(torch, timings))
            if problem is not None:
                seconds = [(config, timings[choice] * 1e-3) for choice, config in configs.items()]
                rows = [(config, s) for config, s in seconds if 0 < s < math.inf]
                start = self._compile_start.pop(problem.key, None)
                self.log.add_measurements(problem, rows, time.monotonic() - start if start is not None else 0.0)
                if self.service is not None and rows:
                    times_ns = {config: s * 1e9 for config, s in rows}
                    default_ns = times_ns.get(CUBLAS, min(times_ns.values()))
                    self.service.report(_with_version(problem), default_ns, list(times_ns.items()))
        except Exception as error:  # a record that cannot be made must not stop a compilation
            self.note(error)

    def _configs(self, timings: Any, op: str, nodes: Sequence[Any]) -> tuple[Problem | None, dict[Any, Config]]:
        """Return the product that PyTorch benchmarked, and the configuration of each candidate the model knows."""
        # `addmm` has the bias as its first operand; the matrices are the last two.
        left, right = nodes[-2:]
        sides = [([int(n) for n in node.get_size()], [int(n) for n in node.get_stride()]) for node in (left, right)]
        problem = problem_of(op, sides[0], sides[1], str(left.get_dtype()))
        configs = {}
        for choice in timings if problem is not None else ():
            template_choice = getattr(choice, "annotations", {}).get("ktc")
            if template_choice is not None:
                template = str(template_choice.template.uid)
                template_config = config_of(template, template_choice.params.to_kwargs())
                if template_config is not None:
                    configs[choice] = template_config
        return problem, configs

    def is_pinned_choice(self, choice: Any) -> bool:
        """Tell whether a choice of the compiler was selected by predictions alone."""
        return id(getattr(choice, "annotations", {}).get("ktc")) in self.pinned_templates

    def note(self, error: Exception) -> None:
        """Add an error's text to the report, unless it is there already."""
        text = f"{type(error).__name__}: {error}"
        if text not in self.notes:
            self.notes.append(text)


class TilewiseChoices(InductorChoices):
    """PyTorch's template choices, reduced to the promising ones."""

    advisor: Advisor | None = None  # of the last `enable()`; the compiler creates instances of this class itself

    def uuid(self) -> str:
        """Return the key that PyTorch 2.13 and later add to the compiler's cache keys."""
        return self.advisor.key if self.advisor is not None else "tilewise"

    def get_template_configs(self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """List templates: all of them if tilewise ranks them, else as PyTorch would without tilewise."""
        args = (kernel_inputs, templates, op_name, *args)
        advisor = self.advisor
        if advisor is None:
            return super().get_template_configs(*args, **kwargs)
        if self._or_default(False, lambda advisor: advisor.problem(op_name, kernel_inputs) is not None):
            with contextlib.suppress(UnrankedError), self._listing(True):
                return super().get_template_configs(*args, **kwargs)
        with config.patch(advisor.settings_without_ranking()), self._listing(False):
            return super().get_template_configs(*args, **kwargs)

    _is_ranking: bool | None = None  # whether the list under way is ranked; None outside `get_template_configs`

    @contextlib.contextmanager
    def _listing(self, is_ranking: bool) -> Iterator[None]:
        """Set `_is_ranking`, whether the list is made for tilewise to rank, inside the block."""
        before, self._is_ranking = self._is_ranking, is_ranking
        try:
            yield
        finally:
            self._is_ranking = before

    def _finalize_template_configs(self, template_choices: Any, kernel_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce PyTorch's list of candidates to tilewise's selection."""
        choices = super()._finalize_template_configs(template_choices, kernel_inputs, *args, **kwargs)
        op = kwargs.get("op_name", args[1] if len(args) > 1 else "")
        advisor = self.advisor
        if advisor is None or self._is_ranking is False:
            return choices
        try:
            return advisor.select(choices, kernel_inputs, op)
        except MissingChoiceError:  # a frozen lock file promises that nothing else is chosen
            raise
        except Exception as error:
            if not isinstance(error, UnrankedError):
                advisor.note(error)
            if self._is_ranking:  # the exhaustive list is too long to benchmark
                raise UnrankedError from error
            return choices

    def get_flex_attention_fwd_configs(self, head_dim: int, dtype: Any, device_type: str | None = "cuda") -> Any:
        """Return the tilings to benchmark for flexible attention's forward pass; overrides PyTorch's."""
        configs = super().get_flex_attention_fwd_configs(head_dim, dtype, device_type)

        def select(advisor: Advisor) -> Any:
            """Return the advisor's tilings for the attention that is being compiled."""
            # The exhaustive list is not used: the model prefers its deeper pipelines, which never were the fastest.
            tilings = self.get_config_heuristics(device_type).flex_attn_fwd_autotune_configs
            with config.patch(max_autotune=False):  # without autotuning PyTorch lists its default tiling alone
                (default,) = InductorChoices.get_flex_attention_fwd_configs(self, head_dim, dtype, device_type)
            return advisor.select_attention(default, tilings, V.graph.current_node) or configs

        return self._or_default(configs, select)

    def get_conv_configs(self, device_type: str | None = "cuda") -> Any:
        """Return a function that lists a convolution's templates: PyTorch's, selected by tilewise."""
        list_configs: Callable[..., Any] = super().get_conv_configs(device_type)

        def select(m: Any, n: Any, k: Any, **kwargs: Any) -> Any:
            """Return the advisor's templates for a convolution as a product (m, n, k)."""
            configs = list(list_configs(m, n, k, **kwargs))
            return self._or_default(
                configs, lambda advisor: advisor.select_convolution(configs, *_convolution_as_product(m, n))
            )

        return select if device_type in (self.advisor.devices if self.advisor else ()) else list_configs

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Tell whether a reduction should keep whole rows in registers; longer rows qualify than in PyTorch."""
        default, advisor = InductorChoices.should_use_persistent_reduction, TilewiseChoices.advisor
        try:
            if advisor is not None and not cooperative_reduction and fits_registers(features, advisor.devices):
                return True
        except Exception as error:
            if advisor is not None:
                advisor.note(error)
        return bool(default(features, cooperative_reduction))

    def _or_default(self, default: Any, select: Callable[[Advisor], Any]) -> Any:
        """Return `select(advisor)`, or PyTorch's default if there is no advisor or it fails."""
        if self.advisor is None:
            return default
        try:
            return select(self.advisor)
        except Exception as error:
            self.advisor.note(error)
            return default


def _convolution_as_product(m: Any, n: Any) -> tuple[tuple[int, int, int], str]:
    """Return (m, n, k) and dtype of the matrix product equivalent to the convolution being compiled."""
    node: Any = V.graph.current_node
    weight = node.args[1].meta["val"]  # (out, in, *filter)
    return (int(m), int(n), math.prod(int(size) for size in weight.shape[1:])), str(weight.dtype)


def current_gpu() -> Machine:
    """Return this GPU as the `Machine` under which a service stores measurements."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return Machine("triton", name, {"name": name})


def machine_name() -> str:
    """Return the GPU's name with PyTorch's version, for which measured choices are valid."""
    return f"{current_gpu().identity}, PyTorch {torch.__version__}"


def _with_version(problem: Problem) -> Problem:
    """Add PyTorch's version to a problem for the service: other versions have other templates."""
    return Problem({**problem, "pytorch": str(torch.__version__)})
