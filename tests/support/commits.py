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
    EditTables,
    Envelope,
    ReplaceFileReferences,
    TableEdit,
    encode,
)

__all__ = [
    "AddFiles",
    "CommitRequest",
    "Committer",
    "DeleteCollectedFiles",
    "EditTables",
    "Envelope",
    "Message",
    "PointerQueue",
    "PostgresQueue",
    "ReplaceFileReferences",
    "TableEdit",
    "Tables",
    "encode",
]
