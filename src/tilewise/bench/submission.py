"""CompetitionSubmission: an entry of a team, from a recipe to the board.

By default the entry is measured in a fresh Python process with the thread count fixed and nothing of the caller's
loaded, so whatever was patched in the calling process has no part in the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tilewise
from tilewise._addons import require
from tilewise._system import child_environment
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.leaderboard import SUFFIX, LocalLeaderboard
from tilewise.bench.measure import Settings
from tilewise.bench.recipe import Recipe, parse_recipe, read_recipe
from tilewise.bench.scoring import PRACTICE_SPLIT, Score, check_ranked, score_recipe, validate_recipe
from tilewise.bench.validation import Validation
from tilewise.errors import (
    ConfigurationError,
    Rejected,
    TilewiseError,
    TooNoisy,
    UnavailableError,
    type_name,
)

_REFERENCES = Path(__file__).with_name("references")


class CompetitionSubmission(metaclass=ExplainsMethods):
    """An entry for one event.

    >>> entry = CompetitionSubmission("MLP_SPRINT", reference_recipe("MLP_SPRINT"), "the owls")
    >>> entry.recipe.event.name
    'MLP_SPRINT'

    `recipe` is a Recipe, a path to one, or its content as data. `isolated=False` measures in this process.
    """

    def __init__(
        self,
        event: Event | str,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        team: str,
        *,
        settings: Settings | None = None,
        threads: int = 1,
        isolated: bool = True,
    ) -> None:
        """Check the event, the recipe and the team's name."""
        self.event = TinyMLPerf.event(event)
        if not isinstance(team, str):
            raise ConfigurationError(f"the third argument is the team's name, not a {type_name(team)}")
        self.recipe = _as_recipe(recipe)
        self.team = check_team(team)
        self.settings, self.threads, self.isolated = settings or Settings(), threads, isolated
        if self.recipe.event != self.event:
            raise Rejected("schema", f"this recipe is for {self.recipe.event.name}, not for {self.event.name}")
        self._score: Score | None = None

    def validate(self) -> Validation:
        """Check the entry's answers and storage, or raise Rejected with the reason."""
        if self.isolated:
            return Validation(**run_isolated("validate", self.recipe, self.settings, self.threads))
        return validate_recipe(self.recipe, self.settings)

    def compute_score(self) -> Score:
        """Validate, measure and score; the result is cached, so that submitting does not measure again."""
        if self._score is None:
            if self.isolated:
                facts = run_isolated("score", self.recipe, self.settings, self.threads)
                self._score = Score.from_dict(facts)
            else:
                self._score = score_recipe(self.recipe, self.settings)
        return self._score

    def submit_to_leaderboard(self, board: str | Path, token: str | None = None) -> dict[str, Any]:
        """Put the entry on a leaderboard and return its receipt.

        `NAME.jsonl` is a local leaderboard file: the entry is scored here first. Another file name or a database URL is
        a class's board (tilewise-arena). An http:// or https:// address is a server: it receives the recipe and the
        files it names, and measures by itself.
        """
        check_ranked(self.settings.practice)
        if str(board).startswith(("http://", "https://")):
            from tilewise.bench.client import submit

            return submit(str(board), self.recipe, token)
        if Path(board).suffix == SUFFIX:
            return LocalLeaderboard(board).add(self.team, self.recipe, self.compute_score())
        boards = require("tilewise_arena.board", "a board in a database")
        with boards.open_board(board) as board_file:
            receipt: dict[str, Any] = board_file.add_scored(self.team, self.recipe, self.compute_score())
        return receipt


def check_team(team: str) -> str:
    """Check a team's name and return it as a board shows it."""
    good = isinstance(team, str) and 1 <= len(team.strip()) <= 40 and team.isprintable() and team == team.strip()
    if not good:
        raise ConfigurationError("a team's name has 1 to 40 printable characters and no space around it")
    return team


def reference_recipe(event: Event | str) -> Recipe:
    """Return the entry that ships with the package, the record to beat."""
    name = TinyMLPerf.event(event).name
    if TinyMLPerf.event(event).kind == "tiles":
        return _tiles_reference()
    path = _REFERENCES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigurationError(f"{name} has no reference recipe")
    return read_recipe(path)


def _tiles_reference() -> Recipe:
    """Return the reference entry for tiles: the shipped model's five best per kernel of the practice split."""
    from tilewise._system import cache_folder
    from tilewise.costmodel import load_dataset, rank
    from tilewise.costmodel.course.predictions import write_predictions
    from tilewise.costmodel.models.scorer import shipped_scorer

    collection, split = PRACTICE_SPLIT
    scorer = shipped_scorer(collection)
    folder = cache_folder() / "references"
    folder.mkdir(parents=True, exist_ok=True)
    rankings = {kernel.name: rank(scorer, kernel).top(5) for kernel in load_dataset(collection).split(split)}
    write_predictions(folder / "tile_olympiad.csv", rankings, 5)
    content = {"tilewise": 1, "event": "TILE_OLYMPIAD", "name": "reference", "predictions": "tile_olympiad.csv"}
    return parse_recipe(content, folder)


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    """Parse a recipe from a file or parsed JSON; return a `Recipe` unchanged."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return parse_recipe(recipe)
    if not isinstance(recipe, str | Path):
        raise ConfigurationError(
            f"an entry is a recipe (a Recipe, a path or its content as data), not a {type_name(recipe)}; "
            "reference_recipe(event) is one to start from"
        )
    return read_recipe(recipe)


# --- measuring in a separate process ---


def run_isolated(task: str, recipe: Recipe, settings: Settings, threads: int) -> dict[str, Any]:
    """Run `task` ("validate" or "score") in a new interpreter and return its result."""
    request = isolated_request(task, recipe, settings, threads)
    return exchange("tilewise.bench.isolated", request, threads, settings.run_seconds)


def isolated_request(task: str, recipe: Recipe, settings: Settings, threads: int) -> dict[str, Any]:
    """Encode a task, a recipe and settings as a JSON request for the measuring process."""
    folder = None if recipe.folder is None else str(recipe.folder.resolve())
    request: dict[str, Any] = {"task": task, "recipe": recipe.as_dict(), "settings": asdict(settings)}
    return request | {"threads": threads, "folder": folder}


def exchange(module: str, request: Mapping[str, Any], threads: int, limit: float) -> dict[str, Any]:
    """Run `python -m module` on a JSON request with this number of threads; return its answer, or raise its error.

    It is stopped after `limit` seconds.
    """
    command = [sys.executable, "-P", "-m", module]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=limit,
            env=_environment(threads) | child_environment(),
        )
    except subprocess.TimeoutExpired:
        raise TooNoisy(f"not scored: the measurement had not ended after {limit:.0f} s") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
        raise UnavailableError(f"the measuring process ended with code {done.returncode}: {words[0][:300]}") from None
    if "error" in answer:
        raise _error(answer)
    facts: dict[str, Any] = answer["result"]
    return facts


def _error(answer: Mapping[str, Any]) -> TilewiseError:
    """Convert an error that a child process reported as JSON back to an exception."""
    if answer["error"] == "Rejected":
        return Rejected(answer["code"], answer["message"])
    return TooNoisy(answer["message"]) if answer["error"] == "TooNoisy" else TilewiseError(answer["message"])


def _environment(threads: int) -> dict[str, str]:
    """Return a clean environment: this tilewise's path, the thread count for all libraries, no preloading."""
    variables = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR", "SYSTEMROOT") if name in os.environ
    }
    count = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    source = str(Path(tilewise.__file__).resolve().parents[1])
    return variables | count | {"PYTHONPATH": source, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
