"""Training a cost model: the loop, its settings, losses, optimizer and sampling."""

from tilewise.costmodel.train.loop import train

__all__ = ["train"]
