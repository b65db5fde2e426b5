"""Measuring: time, memory, FLOPs, and where a model's time goes against what the machine can do."""

from tilewise.profile.compare import Comparison, Ratio
from tilewise.profile.limits import MeasurementError, TimeLimitError
from tilewise.profile.statistics import Interval
from tilewise.profile.timer import Measurement, Timer

__all__ = ["Comparison", "Interval", "Measurement", "MeasurementError", "Ratio", "TimeLimitError", "Timer"]
