"""The old name of `dormouse.aws.instance`."""

from dormouse.aws.instance import *  # noqa: F403
