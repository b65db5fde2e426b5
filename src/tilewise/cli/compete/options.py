"""Options that the commands of `tilewise compete` share."""

from __future__ import annotations

from typing import Annotated

import typer

ThreadsOption = Annotated[int, typer.Option(min=1, max=64, help="Threads of both sides.")]
LOCAL_BOARD = "leaderboard.jsonl"
