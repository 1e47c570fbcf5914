"""The old name of `dormouse.aws.aws`."""

from dormouse.aws.aws import *  # noqa: F403
