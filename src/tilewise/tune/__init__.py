"""Tuning: kernel families, their measurement, the search for the best configuration, and its use.

families/    the kernels that are tuned, one family per kind
workloads/   the programs whose kernels are measured
measure/     devices, sampling, the collectors, export
search/      the Gaussian process, calibration, confidence, replay
choose/      the decision procedure with its stopping rule, the tuner, the cache of choices, the table of tuned tiles
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.store.aggregate import frame
    from tilewise.tune.choose.chooser import disable, enable, tuned
    from tilewise.tune.choose.tuner import Tuned, Tuner
    from tilewise.tune.measure.collector import Collected, collect
    from tilewise.tune.search.replay import Replay, replay

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "frame", "replay", "tuned"]

# A process that only looks up tuned tiles needs none of them.
__getattr__ = late_names(
    __name__,
    {
        ".choose.chooser": "disable enable tuned",
        ".choose.tuner": "Tuned Tuner",
        ".measure.collector": "Collected collect",
        ".search.replay": "Replay replay",
        "tilewise.store.aggregate": "frame",
    },
)
