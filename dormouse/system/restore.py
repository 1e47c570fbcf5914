"""The old name of `dormouse.aws.restore`."""

from dormouse.aws.restore import *  # noqa: F403
