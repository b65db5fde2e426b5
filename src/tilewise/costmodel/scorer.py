"""The earlier place of `tilewise.costmodel.models.scorer`; its names stay here for one release."""

from tilewise.costmodel.models.scorer import *  # noqa: F403
