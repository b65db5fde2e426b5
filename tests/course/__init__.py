"""Tests of the course's commands, beside whose modules they stand: `course.flags` is the one in `course/`."""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "course"))
