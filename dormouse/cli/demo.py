"""`dormouse demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dormouse.cli.command import Session, command, group
from dormouse.cli.failures import FAILED
from dormouse.cli.options import bounds

app = group()


@command(app, "demo", example="dormouse demo --folder ./demo-lake", on="none")
def demo(
    session: Session,
    folder: Annotated[Path, "A new folder, or that of an earlier demo."] = Path("demo-lake"),
    rows: Annotated[
        int | None, "Generate so many rows of TPC-H lineitem, instead of flights.", bounds(1)
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--remove", help="Keep the data, or remove it at the end.")
    ] = True,
) -> None:
    """A year of real flights: ingested, compacted, split, collected, queried, checked against DuckDB."""
    from dormouse.cli.demo_screen import DemoScreen
    from dormouse.demo.pipeline import run_demo

    report = run_demo(folder, rows=rows, keep=keep, screen=DemoScreen(quiet=session.as_json))
    if session.as_json:
        session.show(report, "")
    if not report.all_match:
        raise typer.Exit(FAILED)
