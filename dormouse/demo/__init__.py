"""The whole pipeline on real data, with every answer checked against DuckDB on the raw data."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path

from dormouse.demo.flights import Flights
from dormouse.demo.lineitem import Lineitem
from dormouse.demo.pipeline import Dataset, DemoReport, Pipeline, Screen, claimed, remove, start_afresh
from dormouse.embedded.local import local
from dormouse.errors import not_installed

__all__ = ["DemoReport", "run_demo"]


def run_demo(folder: Path, *, screen: Screen, rows: int | None = None, keep: bool = True) -> DemoReport:
    """The flights, or so many `rows` of lineitem, in the instance of `folder`, which must be the demo's own.

    Raises `InstanceLocked` while another demo runs there, `DependencyMissing`, or what the pipeline raises.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise not_installed("duckdb", "demo") from None
    shown, folder = str(folder), folder.expanduser().absolute()
    dataset: Dataset = Flights() if rows is None else Lineitem(rows)
    started = time.monotonic()
    with claimed(folder) as work:
        screen.say(f"[bold]Dormouse[/bold]: {dataset.title}")
        screen.say()
        with (
            duckdb.connect(config={"autoinstall_known_extensions": "false"}) as db,
            local(folder) as instance,
        ):
            start_afresh(instance, folder, dataset.table_names)
            with screen.working("getting ready") as say:
                count = dataset.prepare(db, work, say)
            pipeline = Pipeline(instance, dataset, screen)
            pipeline.run()
            screen.tree(instance.table(dataset.main_table))
            answers = pipeline.ask(db, dataset.questions())
            screen.answers(answers)
            removable = not keep and remove(instance, folder, dataset.table_names)
        seconds = time.monotonic() - started
        report = DemoReport(dataset.title, count, shown, tuple(pipeline.steps), tuple(answers), seconds)
        if removable:
            shutil.rmtree(folder)
        _close(screen, report, dataset, keep=keep)
    return report


def _close(screen: Screen, report: DemoReport, dataset: Dataset, *, keep: bool) -> None:
    verdict = (
        f"all {len(report.answers)} answers match DuckDB's"
        if report.all_match
        else "[red]NOT all answers match DuckDB's[/red]"
    )
    screen.say()
    screen.say(f"{report.seconds:.0f} seconds in all; {verdict}.")
    if not keep:
        return
    screen.say(f"The data is in {report.folder} (garbage goes at once there: gc_delay_seconds=0). Try:")
    screen.say(f'  dormouse sql -i {shlex.quote(report.folder)} "{dataset.next_statement()}"')
