"""What takes rows of a table away: deletes and erasures, as a part of `Table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from dormouse.files.deletions import RecordedDeletion
from dormouse.files.erasures import proofs
from dormouse.shaped_table import ShapedTable
from dormouse.tables import compact_on_spark

if TYPE_CHECKING:
    from dormouse.query.deleting import DeleteReport, DeleteWhere
    from dormouse.rounds.erasing import EraseReport

Engine = Literal["auto", "local", "spark"]


class Changing(ShapedTable):
    """The methods, over a table's name and columns."""

    def delete(self, where: DeleteWhere, dry_run: bool = False) -> DeleteReport:
        """Deletes the rows that match, at once, for every reader: whatever they are, one row in the database.

        `where` is as for `query`; `dm.ALL` for all rows. Rows that were committed before it are deleted, and
        those that a `filter` hides, too; what is committed later stays. A row whose value is null only goes
        where null is asked for. Moments before still have them. `dry_run` counts what `query` would give.
        On a keyed table it is a load: rows of loads that began before it are gone, whenever they come. By
        values it writes a mark for each key whose newest row matches.

        Raises `InvalidQuery` for a condition that is none, that bounds nothing (a range that is open at both
        ends), or that does not fit the schema, and for one on values where the property `aggregate` merges
        rows; `TableBusy` when others change the table all the time.
        """
        from dormouse.rounds.deleting import delete

        self._check_not_edited("use dm.Remove")
        if dry_run:
            return delete(self._context, where, dry_run=True)
        with self.changing():
            return delete(self._context, where)

    def erase(
        self,
        where: DeleteWhere,
        dry_run: bool = False,
        *,
        engine: Engine = "auto",
        wait_seconds: float = 60.0,
        abandon_writers: bool = False,
        backups: Sequence[str] = (),
        progress: Callable[[int, int | None], object] = lambda done, total: None,
    ) -> EraseReport:
        """Deletes the rows that match for ever: also from the history, the store, and its deleted objects.

        They are deleted as by `delete`; then each file that has some is merged without them, and the files
        that had some are deleted, whatever the history keeps, so that moments before raise `CutExpired` for
        their keys. Ended at any time, the same call goes on with it. It waits, all in all for `wait_seconds`,
        for jobs that hold such files, for consumers that did not read the deletion, and for writers that
        began before. Then jobs lose the files, consumers are told `CutExpired`, and writers are named in the
        report as `open`, or, with `abandon_writers`, can commit nothing any more. `backups` are places,
        beside those that are known, in which backups are looked at for the files. `progress` is called with
        the files looked at. Gives the proof, which `erasures` keeps. `dry_run` reads the files of the table
        and its history, tells what it has found, and changes nothing.

        Raises `InvalidQuery` as `delete` does; `JobFailed` for a file that cannot be merged, `CheckFailed`
        while references are lost, `TableBusy` while a backup is taken, and `ObjectStoreError`: then the rows
        are deleted, and not erased, until the same call has ended well.
        """
        from dormouse.rounds.erasing import erase, would_erase

        self._check_not_edited("every version of its rows is kept; drop the table to erase them")
        if dry_run:
            return would_erase(self._context, where, progress)
        with self.changing():
            return erase(
                self._context,
                where,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups,
                progress=progress,
                on_spark=compact_on_spark,
            )

    def erasures(self) -> list[EraseReport]:
        """The proofs of the table's erasures, the oldest first."""
        from dormouse.rounds.erasing import EraseReport

        return [EraseReport.from_json(text) for text in proofs(self._context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """The deletions by their numbers: those that readers apply, or all that the history has."""
        return self._context.deletions.list(pending_only=pending_only)
