"""The earlier place of `tilewise.costmodel.models.shipped`; its names stay here for one release."""

from tilewise.costmodel.models.shipped import *  # noqa: F403
