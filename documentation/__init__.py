"""The pages of docs/reference that are made of the code: `python -m documentation`, or `make docs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pages() -> dict[str, Callable[[], str]]:
    """The name of each page in docs/reference, and what makes its text."""
    from documentation import command_line, deployment_settings, error_pages, models, python_api, row_sql

    return {
        "table-properties.md": models.table_properties,
        "process-settings.md": models.process_settings,
        "deployment-settings.md": deployment_settings.render,
        "command-line.md": command_line.render,
        "python.md": python_api.render,
        "errors.md": error_pages.render,
        "row-sql.md": row_sql.render,
    }


def made_of(what: str) -> str:
    """The line that keeps people from changing a page."""
    return f"<!-- Made by `make docs` from {what}: change that, not this file. -->"


def cell(text: str) -> str:
    """For a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|")
