"""The stores of a table's state in PostgreSQL, and the values that they return."""

from __future__ import annotations

from dormouse.state.catalog import Catalog
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.state.files.deletions import Erasure, NewDeletion, RowsContent
from dormouse.state.files.edits import Read
from dormouse.state.files.facts import KeyBounds
from dormouse.state.files.layout import LAYOUTS
from dormouse.state.files.operations import Commit
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.history.due import KINDS, Kind, due_kinds
from dormouse.state.history.moments import record_cut
from dormouse.state.partitions import PartitionStore
from dormouse.state.trees import TreeCache, tree_problems

__all__ = [
    "KINDS",
    "LAYOUTS",
    "Catalog",
    "Commit",
    "CompactionJob",
    "Erasure",
    "FileChecks",
    "FileReferenceStore",
    "KeyBounds",
    "Kind",
    "NewDeletion",
    "PartitionStore",
    "Read",
    "RowsContent",
    "TableContext",
    "TreeCache",
    "WriteAttempt",
    "WriteAttempts",
    "due_kinds",
    "record_cut",
    "tree_problems",
]
