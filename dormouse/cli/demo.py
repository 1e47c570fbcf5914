"""`dormouse demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dormouse.cli.failures import FAILED
from dormouse.cli.verbs import Session, verb


def add_to(app: typer.Typer) -> None:
    verb(app, "demo", example="dormouse demo --folder ./demo-lake", opens=False)(demo)


def demo(
    session: Session,
    folder: Annotated[Path, typer.Option(help="A new folder, or that of an earlier demo.")] = Path(
        "demo-lake"
    ),
    rows: Annotated[
        int | None, typer.Option(min=1, help="Generate so many rows of TPC-H lineitem, instead of flights.")
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
        session.show(report, lambda: "")
    if not report.all_match:
        raise typer.Exit(FAILED)
