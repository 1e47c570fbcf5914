"""Jobs, their store and their claims; payloads."""

from __future__ import annotations

from dormouse.jobs import JobStore, Progress
from dormouse.jobs.claims import Claims
from dormouse.payloads import PayloadStore

__all__ = [
    "Claims",
    "JobStore",
    "PayloadStore",
    "Progress",
]
