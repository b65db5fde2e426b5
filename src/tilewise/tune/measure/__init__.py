"""Measuring: devices and their clocks, sampling, the collectors and export; here the interface of a trial."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewise.store.problem import Config


@dataclass(frozen=True)
class TrialResult:
    """Runtime of a configuration and of the default at the same time, or the reason why there is none."""

    runtime_ns: float | None
    default_ns: float | None
    status: str = "ok"
    reason: str = ""


class Trial(Protocol):
    """Measures configurations of one problem."""

    def measure(self, config: Config) -> TrialResult: ...

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Time again configurations whose first times are close; return nanoseconds, None for a failure.

        They are timed interleaved where possible, and scaled like the results of `measure`.
        """
