"""Autograding: the lessons' exercises as assignments for otter-grader (Gradescope) and nbgrader.

`write_assignment` and `write_course` write them; `must_be_solved` is what their hidden tests call. Answers run in the
sandbox, never in the grader's kernel.
"""

from tilewise_arena.grading.judging import judge, must_be_solved
from tilewise_arena.grading.nbgrader import write_course
from tilewise_arena.grading.otter import write_assignment

__all__ = ["judge", "must_be_solved", "write_assignment", "write_course"]
