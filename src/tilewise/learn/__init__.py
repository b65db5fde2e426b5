"""The lessons' exercises: unfinished files to start from, checks that say what is wrong with an answer, and hints."""

from tilewise.learn.checking import LESSONS, Result, check, start
from tilewise.learn.notebook import hint, hints, report
from tilewise.learn.solved import progress

__all__ = ["LESSONS", "Result", "check", "hint", "hints", "progress", "report", "start"]
