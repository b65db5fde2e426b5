"""generate tokens with a GPT"""

from tilewise import models
from tilewise.generate import generate


def run() -> None:
    list(generate(models.gpt("4x128"), [1, 2, 3], 4))
