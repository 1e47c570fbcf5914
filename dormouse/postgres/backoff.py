"""How long to wait before another attempt."""

from __future__ import annotations

import random

BACKOFF_SECONDS_MIN = 0.005
BACKOFF_SECONDS_MAX = 1.0


def backoff_seconds(attempt: int) -> float:
    """Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/"""
    ceiling = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2 ** min(attempt, 20))
    return random.uniform(0, ceiling)  # noqa: S311
