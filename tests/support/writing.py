"""Loads, compactions, splits, and the sources of rows."""

from __future__ import annotations

from dormouse.data.sketches import FileSketches
from dormouse.sources.infer import infer
from dormouse.sources.source import open_source
from dormouse.writing import edits, listed_deletions
from dormouse.writing.compaction import compact
from dormouse.writing.compaction_job import run_compaction
from dormouse.writing.deleting import asked_to_delete
from dormouse.writing.edits import Computed, Concern, Edit
from dormouse.writing.ingest import (
    commit_files,
    ingest,
    ingest_in_process,
    keyed_rows,
    write_leaves,
    written,
)
from dormouse.writing.inlining import InlinedLeaves
from dormouse.writing.merge import merge_sorted
from dormouse.writing.merging import Merge, PartialUpsert
from dormouse.writing.splitting import split
from dormouse.writing.updating import Update

__all__ = [
    "Computed",
    "Concern",
    "Edit",
    "FileSketches",
    "InlinedLeaves",
    "Merge",
    "PartialUpsert",
    "Update",
    "asked_to_delete",
    "commit_files",
    "compact",
    "edits",
    "infer",
    "ingest",
    "ingest_in_process",
    "keyed_rows",
    "listed_deletions",
    "merge_sorted",
    "open_source",
    "run_compaction",
    "split",
    "write_leaves",
    "written",
]
