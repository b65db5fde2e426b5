"""TinyMLPerf: events, recipes, scoring and submission.

- `TinyMLPerf` lists the events; an `Event` says which model, which data and what is timed.
- `benchmark_model` and `compute_speedup` measure one model, and two against each other.
- `CompetitionSubmission` validates and scores a recipe and puts it on a leaderboard.
"""

from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.measure import Benchmark, Settings, Speedup, benchmark_model, compute_speedup
from tilewise.bench.recipe import Recipe, parse_recipe, read_recipe
from tilewise.bench.scoring import Score
from tilewise.bench.submission import CompetitionSubmission, reference_recipe
from tilewise.bench.validation import Validation
from tilewise.errors import Rejected, TooNoisy

__all__ = [
    "Benchmark",
    "CompetitionSubmission",
    "Event",
    "Recipe",
    "Rejected",
    "Score",
    "Settings",
    "Speedup",
    "TinyMLPerf",
    "TooNoisy",
    "Validation",
    "benchmark_model",
    "compute_speedup",
    "parse_recipe",
    "read_recipe",
    "reference_recipe",
]
