"""The points where layouts differ: parts of the store's SQL, and the statements that are theirs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from psycopg import sql

from dormouse.errors import InvalidInput
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.text import narrow_bytes
from dormouse.postgres.queries import (
    Queries,
    Query,
    Statement,
    Uuids,
    booleans,
    bytes_,
    integers,
    load,
    texts,
)

# Values of the store as arrays for its SQL, and its rows as values.

Parameters = dict[str, Any]
_REFERENCE_FIELDS = tuple(field.name for field in fields(FileReference))


def reference_arrays(
    prefix: str, references: Sequence[FileReference], ids: Mapping[str, bytes] | None = None
) -> Parameters:
    """References as columns; `ids` has the narrow ids of their files, where they are known."""
    names = [r.filename for r in references]
    columns = {
        "partition_ids": texts([r.partition_id for r in references]),
        "file_ids": Uuids([ids[name] for name in names] if ids else list(map(narrow_bytes, names))),
        "filenames": texts(names),
        "row_counts": integers([r.row_count for r in references]),
        "approximate": booleans([r.count_approximate for r in references]),
        "only": booleans([r.only_contains_data_for_this_partition for r in references]),
    }
    return {f"{prefix}_{name}": values for name, values in columns.items()}


def file_arrays(commits: Sequence[int], files: Sequence[FileWithReferences]) -> Parameters:
    """Files, each of the commit of its number."""
    references = [(n, reference) for n, f in zip(commits, files, strict=True) for reference in f.references]
    references.sort(key=lambda pair: pair[1].partition_id)  # neighbours in the index come together
    ids = {f.filename: narrow_bytes(f.filename) for f in files}
    return {
        "commits": integers(commits),
        "file_ids": Uuids([ids[f.filename] for f in files]),
        "filenames": texts([f.filename for f in files]),
        "byte_counts": integers([f.byte_count for f in files]),
        "row_counts": integers([f.row_count for f in files]),
        "min_keys": bytes_([f.min_key for f in files]),
        "max_keys": bytes_([f.max_key for f in files]),
        "digests": Uuids([f.digest for f in files]),
        "deletions_till": integers([f.deletions_till for f in files]),
        "referenced": booleans([bool(f.references) for f in files]),
        "ref_commits": integers([n for n, _ in references]),
        **reference_arrays("ref", [reference for _, reference in references], ids),
    }


def key_arrays(keys: Iterable[tuple[str, str]]) -> Parameters:
    """(partition id, filename) pairs."""
    listed = list(keys)
    return {
        "partition_ids": texts([p for p, _ in listed]),
        "file_ids": Uuids([narrow_bytes(f) for _, f in listed]),
    }


def assign_arrays(commits: Sequence[int], requests: Sequence[AssignJobIdRequest]) -> Parameters:
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        **_input_arrays([r.filenames for r in requests]),
    }


def replace_arrays(commits: Sequence[int], requests: Sequence[ReplaceFileReferencesRequest]) -> Parameters:
    outputs = [(n, r, r.new_reference) for n, r in enumerate(requests, 1) if r.new_reference is not None]
    files = [request.new_file for _, request, _ in outputs]
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        "deletions_till": integers([r.deletions_till for r in requests]),
        **_input_arrays([r.input_filenames for r in requests]),
        "out_requests": integers([n for n, _, _ in outputs]),
        **reference_arrays("out", [reference for _, _, reference in outputs]),
        "out_byte_counts": integers([f.byte_count if f else None for f in files]),
        "out_min_keys": bytes_([f.min_key if f else None for f in files]),
        "out_max_keys": bytes_([f.max_key if f else None for f in files]),
        "out_digests": Uuids([f.digest if f else None for f in files]),
        "out_deletions_till": integers([r.deletions_till for _, r, _ in outputs]),
    }


def split_arrays(commits: Sequence[int], requests: Sequence[SplitFileReferenceRequest]) -> Parameters:
    news = [request.new_references for request in requests]
    return {
        "commits": integers(commits),
        **key_arrays((r.old_reference.partition_id, r.old_reference.filename) for r in requests),
        "filenames": texts([r.old_reference.filename for r in requests]),
        "targets": texts([texts([new.partition_id for new in group]) for group in news]),
        "row_counts": texts([integers([new.row_count for new in group]) for group in news]),
        "approximate": texts([booleans([new.count_approximate for new in group]) for group in news]),
        "only": texts(
            [booleans([new.only_contains_data_for_this_partition for new in group]) for group in news]
        ),
    }


def forget_arrays(commits: Sequence[int], filenames: Sequence[str]) -> Parameters:
    return {
        "commits": integers(commits),
        "file_ids": Uuids(list(map(narrow_bytes, filenames))),
        "filenames": texts(filenames),
    }


def reference_from_row(row: Sequence[Any]) -> FileReference:
    """The columns of the query `reference_columns`, which are the fields."""
    return FileReference(**dict(zip(_REFERENCE_FIELDS, row, strict=True)))


def _input_arrays(groups: Sequence[Sequence[str]]) -> Parameters:
    """Files by request: the ids of all, and from which to which each has."""
    sizes = list(map(len, groups))
    lasts = list(accumulate(sizes))
    return {
        "inputs": Uuids([narrow_bytes(name) for group in groups for name in group]),
        "firsts": integers([last - size + 1 for last, size in zip(lasts, sizes, strict=True)]),
        "lasts": integers(lasts),
    }


# parts that a layout supplies to the store's statements; all its other queries are whole statements
_PARTS = (
    "live", "track", "is_tracked", "lock_file", "forget_files", "counts_added", "counts_changed",
    "forget_all", "file_facts", "create_files", "attach_files", "lock", "count_unreferenced",
    "mark_referenced",
)  # fmt: skip
# names that differ: a writer that does not know of a conversion cannot write into the wrong tables
_TABLES = {
    "file_table": {"file_reference": "file_reference", "file": "file"},
    "salted_counts": {"file_reference": "salted_reference", "file_count": "file_count"},
    "dummy_reference": {"file_reference": "marked_reference"},
}
_MODULES = (
    "store", "parts", "reads", "compaction_jobs", "layout", "watermarks", "totals", "differences", "checks",
    "moves",
)  # fmt: skip
_STORE, _SHARED_PARTS, _READS, _JOBS, _LAYOUT, _WATERMARKS, _TOTALS, _DIFFERENCES, _CHECKS, _MOVES = (
    load(__package__ or "", name) for name in _MODULES
)
LAYOUTS = tuple(_TABLES)
MAY_BE_OF = _SHARED_PARTS["may_be_of"]


@dataclass(frozen=True)
class Layout:
    """The SQL of one layout: `layout["replace"]` is the store's statement with the layout's parts in it."""

    name: str
    own: Queries

    @cached_property
    def queries(self) -> dict[str, Query]:
        return self._queries("found")

    @cached_property
    def older(self) -> dict[str, Query]:
        """Likewise, for servers before `WALKS_ARRAYS`."""
        return self._queries("found_one_by_one")

    @cached_property
    def parts(self) -> dict[str, Query]:
        """What the layout supplies to statements, also of other rooms."""
        return {name: self.own[name] for name in _PARTS}

    def _queries(self, found: str) -> dict[str, Query]:
        parts = {**self.parts, **_SHARED_PARTS, "reference_columns": _READS["reference_columns"]}
        parts |= {name: _JOBS[name] for name in ("claim", "claimed", "jobs_claimed", "is_open")}
        parts |= {name: _WATERMARKS[name] for name in ("mark_freed", "remembered")}
        parts["found"] = _SHARED_PARTS[found]
        merged = _SHARED_PARTS["merged"]
        parts["merged_of_refs"] = merged.including(named=_SHARED_PARTS["named_by_refs"])
        parts["merged_of_targets"] = merged.including(named=_SHARED_PARTS["named_by_targets"])
        pending = {"deletions_pending": _SHARED_PARTS["deletions_pending"]}
        parts["has_pending"] = _SHARED_PARTS["has_pending"].including(**pending)
        parts["without_deletions"] = _SHARED_PARTS["without_deletions"].including(
            file_facts=self.own["file_facts"], has_pending=parts["has_pending"], **pending
        )
        whole = {**_STORE, **_READS, **_JOBS, **_LAYOUT, **_TOTALS, **_DIFFERENCES, **_CHECKS, **_MOVES}
        whole |= self.own
        return {name: query.including(**parts) for name, query in whole.items()}

    def tables(self, table_id: int) -> dict[str, str]:
        """The names of one table's own PostgreSQL tables, by the identifiers that stand for them in SQL."""
        return {kind: f"{name}_{table_id}" for kind, name in _TABLES[self.name].items()}

    def names(self, table_id: int) -> dict[str, str]:
        """As `tables`, with the names of what else is made with them."""
        tables = self.tables(table_id)
        return {**tables, "unreferenced": f"{tables['file_reference']}_unreferenced"}

    def on(self, name: str, table_id: int) -> sql.Composed:
        """A statement on one table's own PostgreSQL tables."""
        return composed(self.queries[name], self.names(table_id))

    def statement(self, name: str, table_id: int) -> Statement:
        """As `on`, for what runs often."""
        return _statement(self.name, name, table_id)

    def create(self, table_id: int) -> sql.Composed:
        """Makes one table's own PostgreSQL tables."""
        return composed(self.queries["create"].literally(table_id=table_id), self.names(table_id))


def composed(query: Query, names: Mapping[str, str]) -> sql.Composed:
    """A query on those of the names that stand in it."""
    return query.on(**{kind: names[kind] for kind in query.identifiers})


@lru_cache
def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise InvalidInput(f"layout {name!r} is not known; use {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}")
    return Layout(name, load(__package__ or "", name))


@lru_cache(maxsize=10_000)
def _statement(layout_name: str, name: str, table_id: int) -> Statement:
    known = layout(layout_name)
    names = known.names(table_id)
    return Statement(composed(known.queries[name], names), older=composed(known.older[name], names))
