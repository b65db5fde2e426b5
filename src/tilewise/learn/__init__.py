"""The lessons' exercises and labs: checks that say what is wrong with an answer, hints, and sealed predictions."""

from tilewise.learn.checking import LESSONS, Result, check, start
from tilewise.learn.labs import Lab, lab
from tilewise.learn.notebook import hint, hints, progress, report

__all__ = ["LESSONS", "Lab", "Result", "check", "hint", "hints", "lab", "progress", "report", "start"]
