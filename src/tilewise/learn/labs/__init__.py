"""Labs: predict a measurement, seal the prediction, measure on this machine, and be graded on a log scale.

The three most important names: `lab` (open or continue a lab), `Lab` and `grade` (grade a lab's record).
"""

from tilewise.learn.labs.labwork import Lab, lab
from tilewise.learn.labs.record import LabGrade, QuestionGrade, grade, statistics

__all__ = ["Lab", "LabGrade", "QuestionGrade", "grade", "lab", "statistics"]
