"""Loads, compactions, splits, and the sources of rows."""

from __future__ import annotations

from dormouse.data.sketches import FileSketches
from dormouse.sources.infer import infer
from dormouse.sources.source import open_source
from dormouse.writing import listed_deletions
from dormouse.writing.compaction import compact
from dormouse.writing.compaction_job import run_compaction
from dormouse.writing.ingest import commit_files, ingest, ingest_in_process, write_leaves
from dormouse.writing.merge import merge_sorted
from dormouse.writing.splitting import split

__all__ = [
    "FileSketches",
    "commit_files",
    "compact",
    "infer",
    "ingest",
    "ingest_in_process",
    "listed_deletions",
    "merge_sorted",
    "open_source",
    "run_compaction",
    "split",
    "write_leaves",
]
