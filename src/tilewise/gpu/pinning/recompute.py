"""Compare a lock file with the choices that the installed tilewise would make, without a GPU.

A choice is a pure function of its inputs and of the model. If the model is still the one that the file names, nothing
can have changed. Otherwise matrix products are chosen again from the candidates that the file lists. Choices that need
the kernel's own code cannot be made again here; they are reported as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from tilewise.gpu.devices import find_device
from tilewise.gpu.inductor.templates import FAMILY, choose_among
from tilewise.gpu.pinning.choose import model_digest, rank_matmul, shipped_model
from tilewise.gpu.pinning.lock import LockedChoice
from tilewise.gpu.pinning.ranker import RANKER, shipped_ranker
from tilewise.gpu.products.config_fields import is_cublas
from tilewise.gpu.products.dispatch import LOCK_KERNEL, choose_unmeasured
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.gpu.triton_kernel import match_matmul
from tilewise.store.problem import Problem


class LockVerdict(StrEnum):
    """The result of comparing one choice with today's."""

    SAME = "same"
    CHANGED = "changed"
    UNKNOWN = "unknown"  # only a run with the kernel itself can tell


@dataclass(frozen=True)
class LockComparison:
    """A choice of the file and the one that would be made today."""

    locked: LockedChoice
    today: LockedChoice | None
    verdict: LockVerdict


def compare_lock(choices: Iterable[LockedChoice]) -> list[LockComparison]:
    """Compare every choice of a lock file."""
    return [_compare_choice(choice) for choice in choices]


def _compare_choice(choice: LockedChoice) -> LockComparison:
    """Compare one choice: unchanged models cannot choose differently, others choose again if they can."""
    if choice.model in ("", *_current_models()):
        return LockComparison(choice, choice, LockVerdict.SAME)
    if choice.model.startswith(RANKER):
        return LockComparison(choice, None, LockVerdict.UNKNOWN)
    if choice.kernel == LOCK_KERNEL:
        today = _choose_product(choice)
    else:
        today = _choose_template(choice) if choice.kernel.startswith(f"{FAMILY}.") else _choose_matmul(choice)
    if today is None:
        return LockComparison(choice, None, LockVerdict.UNKNOWN)
    return LockComparison(choice, today, LockVerdict.SAME if today.config == choice.config else LockVerdict.CHANGED)


def _current_models() -> tuple[str, ...]:
    """Name the installed models as lock files do."""
    runtime_model = shipped_runtime_model()
    ranker = shipped_ranker()
    names = [model_digest()]
    names += [] if runtime_model is None else [f"products {runtime_model.digest}"]
    return (*names, *(() if ranker is None else (ranker.name,)))


def _choose_matmul(choice: LockedChoice) -> LockedChoice | None:
    """Choose a configuration of a Triton matrix product again; None if it is not one or has no model."""
    dtypes = [str(value) for name, value in choice.problem.items() if name.startswith("dtype")]
    as_matmul = match_matmul([dict(config) for config in choice.candidates], choice.problem, dtypes)
    device = find_device(choice.device)
    model = None if as_matmul is None or device is None else shipped_model(choice.device)
    if as_matmul is None or model is None or device is None:
        return None
    ranking = rank_matmul(model, *as_matmul, device)
    best = ranking.order[0]
    costs = ranking.costs or ()
    return replace(choice, config=choice.candidates[best], predicted=float(costs[best]), model=ranking.model)


def _choose_product(choice: LockedChoice) -> LockedChoice | None:
    """Choose the kernel of one of tilewise's own products again."""
    model, device = shipped_runtime_model(), find_device(choice.device)
    if model is None or device is None:
        return None
    problem = Problem({**choice.problem, "family": LOCK_KERNEL})
    best = choose_unmeasured(model, problem, device.shared_bytes_per_block)
    return replace(choice, config=best.config, model=f"products {model.digest}")


def _choose_template(choice: LockedChoice) -> LockedChoice | None:
    """Choose a template of PyTorch's compiler again, from the candidates that the file lists."""
    model = shipped_runtime_model()
    templates = [config for config in choice.candidates if not is_cublas(config)]
    if model is None or not templates:
        return None
    problem = Problem({**choice.problem, "family": FAMILY})
    best, microseconds = choose_among(model, problem, templates, bool(choice.problem.get("fuses", 0)))
    return replace(choice, config=best, predicted=microseconds, model=f"products {model.digest}")
