"""The pages of docs/reference that are made of the code: `python -m documentation`, or `make docs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pages() -> dict[str, Callable[[], str]]:
    """Returns the names of the generated pages in docs/reference, each with the function that makes its text."""
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
    """Returns the line that warns readers not to edit a generated page."""
    return f"<!-- Made by `make docs` from {what}: change that, not this file. -->"


def cell(text: str) -> str:
    """Returns a text escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
