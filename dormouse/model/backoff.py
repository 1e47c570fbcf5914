"""How long to wait before another attempt."""

from __future__ import annotations

import random

BACKOFF_SECONDS_MIN = 0.005
BACKOFF_SECONDS_MAX = 1.0


def backoff_seconds(
    attempt: int, seconds_min: float = BACKOFF_SECONDS_MIN, seconds_max: float = BACKOFF_SECONDS_MAX
) -> float:
    """Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    From 0 to twice `seconds_min` after the first attempt, to twice as much after each, at most `seconds_max`.
    """
    ceiling = min(seconds_max, seconds_min * 2 ** min(attempt, 20))
    return random.uniform(0, ceiling)  # noqa: S311
