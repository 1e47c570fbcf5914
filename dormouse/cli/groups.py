"""The commands of the program in groups, as its help lists them."""

from __future__ import annotations

import shutil
from typing import Any

from typer.core import TyperGroup

GROUPS = {
    "Begin": ("demo", "table", "completion"),
    "Data": ("ingest", "upsert", "query", "sql", "delete", "erase", "erasures", "rows", "payloads"),
    "History": ("history", "changes", "restore-table"),
    "Maintenance": ("status", "maintain", "compact", "split", "merge", "gc", "holds", "check", "orphans"),
    "Backups": ("backup", "backups", "restore", "restore-metadata", "adopt"),
    "Programs and queues": ("serve", "jobs", "committer", "commit-status", "queue"),
    "Instances on AWS": (
        *("doctor", "cost", "pause", "resume", "destroy", "env", "access"),
        *("dead-letters", "restore-objects"),
    ),
}
"""Each command is in one of them: a test compares."""


def width() -> int:
    """How many columns help may take: those of the terminal, and where there is none 80."""
    return shutil.get_terminal_size((80, 24)).columns


class Grouped(TyperGroup):
    """Lists its commands under the names of their groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name: command for name, command in self.commands.items() if not command.hidden}
        limit = formatter.width - 6 - max(map(len, known))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, known[name].get_short_help_str(limit)) for name in names])
