"""The steps of a merge that run in tasks: they make new rows, and look for rows that are changed twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type, conform
from dormouse.errors import AmbiguousRows
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, given_schema, is_keyed
from dormouse.spark.clauses import Clauses, Value
from dormouse.spark.staged_rows import ROW, StagedFile, StagingArea
from dormouse.spark.worker import check_seen
from dormouse.state.context import TableContext
from dormouse.writing.deleting import DELETES
from dormouse.writing.edit_rules import Clause, check_newest, identity, key_text

CLAUSE, BEFORE, VALUES = "__clause", "__before", "__values"
"""The columns with the number of a change's clause, the row before it, and the values of a clause."""
INSERTED = "__inserted"
"""The column that is true for a row that did not exist before."""
TWICE = "__twice"
"""The column that is true for a row that is changed twice."""
NEW, OLD = "new", "old"
"""The kinds of staged objects: with new rows, and with the rows that are changed."""
COUNTS = {"insert": "inserted", "update": "updated", "delete": "deleted"}
REPORT = "kind string, name string, rows long, bytes long, inserted long, updated long, deleted long"
_REPORT = pa.schema(
    [("kind", pa.string()), ("name", pa.string())]
    + [(name, pa.int64()) for name in ("rows", "bytes", *COUNTS.values())]
)


@dataclass(frozen=True)
class ChangeRows:
    """A step that stages new rows, and of each changed row the columns `names`, for a merge.

    Receives the rows of `changed_pairs`. `names` are the row keys of a keyed table. For any other table, rows
    with equal values in them are changed alike.
    """

    area: StagingArea
    table: str
    schema: Schema
    properties: TableProperties
    clauses: tuple[Clause[Value], ...]
    names: tuple[str, ...]

    @staticmethod
    def of(context: TableContext, clauses: Clauses, area: StagingArea) -> ChangeRows:
        schema, properties = context.schema, context.properties
        names = schema.row_key_names if is_keyed(properties) else identity(context, clauses.columns)
        return ChangeRows(area, context.table.name, schema, properties, clauses.listed, names)

    @property
    def is_keyed(self) -> bool:
        return is_keyed(self.properties)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields rows of `REPORT`, one for each object. The first has the numbers of changed rows."""
        check_seen(self.area.objects)
        counts = dict.fromkeys(COUNTS.values(), 0)
        with self.area.writer() as new, self.area.writer() as old:
            for batch in batches:
                for number, clause in enumerate(self.clauses):
                    rows = batch.filter(pc.equal(batch.column(CLAUSE), number))
                    if rows.num_rows:
                        counts[COUNTS[clause.action]] += rows.num_rows
                        self._change(clause, number, rows, new, old)
        for kind, written in ((NEW, new.written), (OLD, old.written)):
            if written is not None:
                values = [kind, *written, *counts.values()]
                yield pa.RecordBatch.from_pylist([dict(zip(_REPORT.names, values, strict=True))], _REPORT)
                counts = dict.fromkeys(counts, 0)

    def _change(
        self, clause: Clause[Value], number: int, rows: pa.RecordBatch, new: StagedFile, old: StagedFile
    ) -> None:
        before = after = None
        if clause.action != "insert":
            before = conform(pa.RecordBatch.from_struct_array(rows.column(BEFORE)), self.schema)
        if clause.action != "delete":
            after = conform(self._values(clause, number, rows, before), self.schema)
            if before is not None and (by := self.properties.newest_by) is not None:
                what = f"merge into table {self.table!r}"
                check_newest(what, self.schema, self.properties, after, before.column(by))
        if self.is_keyed:
            new.add(self._marked(before, after))
        elif after is not None:
            new.add(after)
        changed = after if before is None and self.is_keyed else before
        if changed is not None:
            inserted = pa.repeat(pa.scalar(before is None), rows.num_rows)
            kept = changed.select(list(self.names)).append_column(ROW, rows.column(ROW))
            old.add(kept.append_column(INSERTED, inserted))

    def _values(
        self, clause: Clause[Value], number: int, rows: pa.RecordBatch, before: pa.RecordBatch | None
    ) -> pa.RecordBatch:
        """Returns the values of a clause, and of an update also those that stay."""
        columns = {} if before is None else dict(zip(before.schema.names, before.columns, strict=True))
        for name, value in clause.values.items():
            if value.expression is not None:
                columns[name] = rows.column(f"{VALUES}{number}").field(name)
            elif value.constant is None:
                # nulls without a type fit any column that may be null, whatever its parts are
                columns[name] = pa.nulls(rows.num_rows)
            else:
                scalar = pa.scalar(value.constant, arrow_type(self.schema.field(name).type))
                columns[name] = pa.repeat(scalar, rows.num_rows)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _marked(self, before: pa.RecordBatch | None, after: pa.RecordBatch | None) -> pa.RecordBatch:
        """Returns rows of a keyed table as an upsert takes them: new rows, or marks of deletion."""
        given = given_schema(self.schema, self.properties, DELETES)
        rows = after
        if rows is None:
            assert before is not None  # noqa: S101 as an insert has new rows
            kept_names = (*self.schema.row_key_names, self.properties.newest_by)
            rows = before.select([name for name in before.schema.names if name in kept_names])
        marks = pa.repeat(pa.scalar(after is None), rows.num_rows)
        return conform(rows.append_column(DELETES, marks), given)


@dataclass(frozen=True)
class LookForTwice:
    """A step that raises `AmbiguousRows` for a row that is changed twice, and yields the others."""

    table: str
    schema: Schema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            at = pc.index(batch.column(TWICE), True).as_py()
            if at >= 0:
                raise AmbiguousRows(
                    f"merge into table {self.table!r}: several rows of the source change the row with "
                    f"{key_text(self.schema, batch, at)}; make them one, or let a clause do nothing for the "
                    "others",
                    table=self.table,
                )
            yield batch.drop_columns([TWICE])
