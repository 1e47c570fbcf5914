"""The application of an `EditTables` request: one transaction over all its tables, all or nothing."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dormouse.errors import DormouseError, EditConflict, InvalidInput, one_line
from dormouse.model.region import decode_value
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.stored_conditions import current_condition
from dormouse.model.table import TableRecord, check_not_edited
from dormouse.postgres.connection import Supplier
from dormouse.state.commits.requests import ONE_PART_EACH, EditTables, TableEdit
from dormouse.state.files.deletions import NewDeletion
from dormouse.state.files.edits import Disturbed, Part, commit
from dormouse.state.files.store import FileReferenceStore

_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""Errors of reading a condition or a bound that a broken sender made."""


def part_of(edit: TableEdit, store: FileReferenceStore) -> Part:
    """Returns the changes of one table of a request."""
    return Part(store, edit.files, edit.deletions, edit.reads, edit.attempt_ids)


def edit_of(part: Part) -> TableEdit:
    """Returns the changes of one table as a part of a request."""
    table = part.store.table
    return TableEdit(
        table=table.name,
        files=tuple(part.files),
        deletions=tuple(part.deletions),
        reads=tuple(part.reads),
        attempt_ids=tuple(part.attempts),
        schema_version=table.schema.version,
        table_id=table.table_id,
        table_uuid=table.uuid,
    )


def apply_edit(
    supplier: Supplier,
    request: EditTables,
    stores: Sequence[FileReferenceStore],
    lock_seconds_max: float,
) -> bool:
    """Applies a request; returns False if it was applied before. `stores` are those of its parts' tables.

    Tries to get locks for `lock_seconds_max`, in short tries. Raises:

    - `EditConflict` if other commits may have changed rows that the edit read;
    - `SchemaMoved` if its deletions are for columns that the table no longer has so;
    - `InvalidInput` if a deletion does not fit its table, or a table takes no edits;
    - `AttemptAbandoned`, and `TableBusy` if it got no lock.
    """
    if len({store.table.table_id for store in stores}) < len(stores):
        raise InvalidInput(ONE_PART_EACH)
    try:
        for edit, store in zip(request.parts, stores, strict=True):
            _check(edit, store.table)
    except DormouseError:
        if stores[0].is_applied(request.commit_id):
            return False
        raise
    parts = [part_of(edit, store) for edit, store in zip(request.parts, stores, strict=True)]
    try:
        return commit(supplier, parts, request.commit_id, lock_seconds_max=lock_seconds_max)
    except Disturbed as disturbed:
        names = sorted({f"table {one.part.store.table.name!r}" for one in disturbed.disturbances})
        raise EditConflict(
            f"{', '.join(names)}: other commits may have changed rows that the edit read; nothing was "
            "changed: compute the edit again",
            table=disturbed.disturbances[0].part.store.table.name,
        ) from None


def _check(edit: TableEdit, table: TableRecord) -> None:
    check_not_edited(table.name, table.properties, "send changes of rows instead")
    if edit.deletions and edit.schema_version not in (None, table.schema.version):
        raise SchemaMoved(f"the columns of table {table.name!r} were changed; compute the edit again")
    for deletion in edit.deletions:
        try:
            _check_deletion(deletion, table.schema)
        except DormouseError:
            raise
        except _UNREADABLE as error:
            raise InvalidInput(
                f"table {table.name!r}: a deletion's condition or bounds cannot be read: {one_line(error)}"
            ) from error


def _check_deletion(deletion: NewDeletion, schema: Schema) -> None:
    listed = current_condition(schema, deletion.condition).rows
    if (listed and listed.content) != (deletion.rows and deletion.rows.name):
        raise InvalidInput("a deletion names rows that it does not have, or has rows that it does not name")
    for values in deletion.bounds:
        if len(values) not in (0, len(schema.row_keys)):
            raise InvalidInput(f"a deletion has {len(values)} bounds for {len(schema.row_keys)} row keys")
        for field, value in zip(schema.row_keys, values, strict=False):
            if value is not None:
                decode_value(field.type, value)
