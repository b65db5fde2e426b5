"""The measuring process: a JSON request on standard input, one line of JSON as the answer.

Run as ``python -m tilewise.bench.isolated``; see `submission.exchange`, which starts it with a clean environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tilewise
from tilewise._system import die_with_parent
from tilewise.bench.jsontext import plain_value
from tilewise.bench.measure import Settings
from tilewise.bench.recipe import parse_recipe
from tilewise.bench.scoring import duel, score_recipe, validate_recipe
from tilewise.errors import Rejected, TilewiseError


def carry_out(request: dict[str, Any]) -> dict[str, Any]:
    """Perform a request of the parent process ("score" or "validate" a recipe); return its result as JSON data."""
    tilewise.set_num_threads(int(request["threads"]))
    folder = Path(request["folder"]) if request.get("folder") else None
    recipe = parse_recipe(request["recipe"], folder)
    settings = Settings(**request["settings"])
    if request["task"] == "validate":
        return validate_recipe(recipe, settings).as_dict()
    if request["task"] == "duel":
        other = request["record"]
        return duel(recipe, parse_recipe(other["recipe"], Path(other["folder"])), settings)
    return score_recipe(recipe, settings).as_dict()


def main() -> None:
    """Carry out the request on standard input, and print its result or error as JSON; runs in a child process."""
    die_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    try:
        answer: dict[str, Any] = {"result": carry_out(request)}
    except TilewiseError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        answer["code"] = error.code if isinstance(error, Rejected) else ""
    print(json.dumps(answer, default=plain_value))


if __name__ == "__main__":
    main()
