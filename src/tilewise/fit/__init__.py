"""Train the reference models, with checkpoints from which a run continues bit for bit.

The three most important names: `fit` (runs a recipe), `FitRecipe` (its settings) and `FitResult`.
"""

from tilewise.fit.loop import Epoch, FitResult, Progress, fit
from tilewise.fit.tasks import FitRecipe, recipe_for

__all__ = ["Epoch", "FitRecipe", "FitResult", "Progress", "fit", "recipe_for"]
