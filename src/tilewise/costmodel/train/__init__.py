"""Training of cost models: loop, settings, losses, optimizer and sampling."""

from tilewise.costmodel.train.loop import train

__all__ = ["train"]
