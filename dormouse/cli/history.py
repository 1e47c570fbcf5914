"""`dormouse history …`: what a table was, and what became of its partitions."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="See what a table was: its partitions over time, its epochs; and how much of it is kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="history")
