"""The old name of `dormouse.state.commits.requests`."""

from dormouse.state.commits.requests import *  # noqa: F403
