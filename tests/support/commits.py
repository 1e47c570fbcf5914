"""Commit requests, their queues and the committer."""

from __future__ import annotations

from dormouse.state.commits.apply import Tables
from dormouse.state.commits.committer import Committer
from dormouse.state.commits.pointers import PointerQueue
from dormouse.state.commits.postgres_queue import PostgresQueue
from dormouse.state.commits.queue import Message
from dormouse.state.commits.requests import (
    AddFiles,
    CommitRequest,
    DeleteCollectedFiles,
    Envelope,
    ReplaceFileReferences,
    encode,
)

__all__ = [
    "AddFiles",
    "CommitRequest",
    "Committer",
    "DeleteCollectedFiles",
    "Envelope",
    "Message",
    "PointerQueue",
    "PostgresQueue",
    "ReplaceFileReferences",
    "Tables",
    "encode",
]
