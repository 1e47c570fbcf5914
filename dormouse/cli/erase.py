"""`dormouse erase`: rows that must be nowhere any more, and the proof of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.data import AllRows, RowsToGo, check_said, rows_to_go
from dormouse.cli.verbs import EngineOption, Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput

if TYPE_CHECKING:
    from dormouse.durability.erasing import EraseReport


def add_to(app: typer.Typer) -> None:
    verb(app, "erase", example="dormouse erase customers --where email=a@example.com --dry-run")(erase)
    verb(app, "erasures", example="dormouse erasures customers --json")(erasures)


def erase(
    session: Session,
    table: TableName,
    where: RowsToGo = None,
    all: AllRows = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look which files have such rows, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    engine: EngineOption = "auto",
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="How long it waits for jobs, consumers and writers.")
    ] = 60.0,
    abandon_writers: Annotated[
        bool,
        typer.Option("--abandon-writers", help="Writers that began before can commit nothing any more."),
    ] = False,
    backups: Annotated[
        list[str] | None,
        typer.Option(help="A place to look for backups in, beside those that are known.", metavar="PLACE"),
    ] = None,
) -> None:
    """Delete rows for ever: also from the history, and what the store keeps of deleted objects. Run again,
    it goes on where it was ended. Asks first on a terminal; elsewhere it needs --yes."""
    from dormouse.cli.console import progress

    check_said("erase", where, all)
    with session.open(read_only=dry_run) as instance:
        found = instance.table(table)
        condition, what = rows_to_go(found, table, where)
        if not (dry_run or yes) and not agreed(
            f"erase {what}", f"Erase {what} for ever, also from the history?"
        ):
            raise InvalidInput("nothing was erased")
        with progress(f"erase rows of {table}", unit="files") as moved:
            report = found.erase(
                condition,
                dry_run,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups or [],
                progress=moved,
            )
    session.show({**asdict(report), "finished": report.is_finished}, lambda: _told(what, report))
    if report.open:
        raise typer.Exit(1)


def erasures(session: Session, table: TableName) -> None:
    """The proofs of a table's erasures, the oldest first."""
    with session.open(read_only=True) as instance:
        found = instance.table(table).erasures()
    session.show(
        [{**asdict(one), "finished": one.is_finished} for one in found],
        lambda: (
            "\n".join(_told(f"deletion {one.deletion_id} of {one.deleted_at}", one) for one in found)
            or f"nothing of table {table} was erased"
        ),
    )


def _told(what: str, report: EraseReport) -> str:
    looked = plural(report.files_looked_at, "file")
    copies = f"{plural(report.rows, 'row')} in {plural(report.files, 'file')}"
    if report.deletion_id is None:
        return f"would erase {what}: {copies} of {looked} that may have some, in the table and its history"
    lines = [
        f"{'erased' if report.is_finished else 'did not finish to erase'} {what} "
        f"(deletion {report.deletion_id}, {report.seconds:.1f} s)",
        f"looked at {looked} of the table and its history, and at "
        f"{plural(report.objects_looked_at, 'object')} beside them",
        f"found {copies}, which are deleted, and {plural(report.versions, 'version')} of deleted objects",
    ]
    lists: dict[str, Any] = {
        "may have rows still": report.open,
        "could not be looked at": report.unreadable,
        "still hold rows or keys": report.backups,
        "consumers that are told that changes were erased": report.consumers,
    }
    for title, names in lists.items():
        lines += [f"{title}:", *(f"  {name}" for name in names)] if names else []
    return "\n".join(lines)
