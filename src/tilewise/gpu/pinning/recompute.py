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
from tilewise.gpu.products.dispatch import LOCK_KERNEL, choose_unmeasured
from tilewise.gpu.products.roofline import is_cublas
from tilewise.gpu.products.runtime_model import RuntimeModel, shipped_runtime_model
from tilewise.gpu.triton_kernel import match_matmul
from tilewise.store.problem import Problem


class LockVerdict(StrEnum):
    """Result of comparing a locked choice with the one that would be made today."""

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
    """Choose a configuration for each locked problem anew, and pair it with the locked one."""
    runtime_model, ranker = shipped_runtime_model(), shipped_ranker()
    unchanged = {"", model_digest()}
    unchanged |= set() if runtime_model is None else {_model_name(runtime_model)}
    unchanged |= set() if ranker is None else {ranker.name}
    comparisons = []
    for choice in choices:
        today = choice if choice.model in unchanged else _choose_again(choice, runtime_model)
        is_same = today is not None and today.config == choice.config
        verdict = LockVerdict.SAME if is_same else LockVerdict.UNKNOWN if today is None else LockVerdict.CHANGED
        comparisons.append(LockComparison(choice, today, verdict))
    return comparisons


def _model_name(model: RuntimeModel) -> str:
    return f"products {model.digest}"


def _choose_again(choice: LockedChoice, model: RuntimeModel | None) -> LockedChoice | None:
    """Repeat a locked choice with the installed models: of a product, a compiler template or a Triton matrix product.

    The result is None for a kernel that was ranked by its code, and without a model or a record of the device.
    """
    device = find_device(choice.device)
    if choice.model.startswith(RANKER):
        return None
    if choice.kernel == LOCK_KERNEL:
        if model is None or device is None:
            return None
        problem = Problem({**choice.problem, "family": LOCK_KERNEL})
        config = choose_unmeasured(model, problem, device.shared_bytes_per_block).config
        return replace(choice, config=config, model=_model_name(model))
    if choice.kernel.startswith(f"{FAMILY}."):
        templates = [config for config in choice.candidates if not is_cublas(config)]
        if model is None or not templates:
            return None
        problem = Problem({**choice.problem, "family": FAMILY})
        config, microseconds = choose_among(model, problem, templates, bool(choice.problem.get("fuses", 0)))
        return replace(choice, config=config, predicted=microseconds, model=_model_name(model))
    dtypes = [str(value) for name, value in choice.problem.items() if name.startswith("dtype")]
    as_matmul = match_matmul([dict(config) for config in choice.candidates], choice.problem, dtypes)
    scores = None if as_matmul is None or device is None else shipped_model(choice.device)
    if as_matmul is None or device is None or scores is None:
        return None
    ranking = rank_matmul(scores, *as_matmul, device)
    best, costs = ranking.order[0], ranking.costs or ()
    return replace(choice, config=choice.candidates[best], predicted=float(costs[best]), model=ranking.model)
