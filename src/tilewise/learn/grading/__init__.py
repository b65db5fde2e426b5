"""Autograding: the exercises as assignments of otter-grader (Gradescope) and nbgrader, judged apart from them."""

from tilewise.learn.grading.judging import judge, must_be_solved

__all__ = ["judge", "must_be_solved"]
