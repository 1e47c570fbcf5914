"""The content of inlined files: a row for each file, which exists as long as the row of the file."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.model.file_reference import FileWithReferences
from dormouse.model.text import narrow_bytes
from dormouse.postgres.queries import Uuids
from dormouse.postgres.transaction import run_statement
from dormouse.state.files.layout import OwnTables
from dormouse.state.files.operations import Commit
from dormouse.state.files.updates import apply_at_once


class InlinedContent:
    """The content of one table's inlined files."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def add(
        self,
        files: Sequence[FileWithReferences],
        *,
        commit_id: str,
        source: bytes | None,
        schema_version: int,
        attempt_id: str | None = None,
    ) -> bool:
        """Adds inlined files in one statement with one flush, if nothing is in the way.

        Ends the attempt, if one is given. Returns False, and adds nothing, if the commit or a file was added
        before, a partition left the tree, the table's schema has another version, or the attempt has ended.
        `add_files_with_references` then tells which it was.
        """
        commit = Commit(
            files, commit_id, expires=False, same_content=False, source=source, attempt_id=attempt_id
        )
        return apply_at_once(self._own, "add_files", commit, {"schema_version": schema_version})

    def read(self, filenames: Sequence[str]) -> dict[str, bytes]:
        """Returns the bytes of inlined files, by name. Files that are not known are left out."""
        ids = {narrow_bytes(name): name for name in filenames}
        rows = self._own.fetch("contents", {"file_ids": Uuids(list(ids))}, run=run_statement)
        return {ids[file_id.bytes]: content for file_id, content in rows}

    def total(self) -> tuple[int, int]:
        """Returns the number and the bytes of the inlined files."""
        [(files, byte_count)] = self._own.looked_up("inlined_total", {}, operation="count inlined files")
        return int(files), int(byte_count)

    def vacuum(self) -> None:
        """Frees the space of deleted content, if the role may do that. An erasure calls it."""
        with self._own.supplier.connection() as conn:
            conn.execute(self._own.on("vacuum_content"))
