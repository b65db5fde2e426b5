"""Training the reference models: recipes, the loop, and checkpoints from which a run continues bit for bit."""

from tilewise.fit.loop import Epoch, FitResult, Progress, fit
from tilewise.fit.recipes import Recipe, recipe_for

__all__ = ["Epoch", "FitResult", "Progress", "Recipe", "fit", "recipe_for"]
