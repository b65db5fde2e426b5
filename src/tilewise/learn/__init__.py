"""The lessons' exercises: unfinished files to start from, and checks that say what is wrong with an answer."""

from tilewise.learn.checking import LESSONS, Result, check, start

__all__ = ["LESSONS", "Result", "check", "start"]
