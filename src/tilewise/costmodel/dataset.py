"""The earlier place of `tilewise.costmodel.data.dataset`; its names stay here for one release."""

from tilewise.costmodel.data.dataset import *  # noqa: F403
