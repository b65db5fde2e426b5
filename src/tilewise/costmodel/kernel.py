"""The earlier place of `tilewise.costmodel.data.kernel`; its names stay here for one release."""

from tilewise.costmodel.data.kernel import *  # noqa: F403
