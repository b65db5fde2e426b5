"""Autograding: the lessons' exercises as assignments for otter-grader (Gradescope) and nbgrader.

`write_assignment` and `write_course` write them; their hidden tests call `must_be_solved` for an exercise and
`must_be_predicted` for the lab. Answers run in the sandbox, never in the grader's kernel.
"""

from tilewise_arena.grading.judging import check_answers, must_be_predicted, must_be_solved
from tilewise_arena.grading.nbgrader import write_course
from tilewise_arena.grading.otter import write_assignment

__all__ = ["check_answers", "must_be_predicted", "must_be_solved", "write_assignment", "write_course"]
