"""Columns' names as they stand in properties: as they are, or in double quotes if they are no words."""

from __future__ import annotations

import csv
import re

NAME = r'\w+|"(?:[^"]|"")+"'
"""A pattern of one."""
_BETWEEN = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""A comma that is in no quotes."""


def name_of(text: str) -> str:
    """The name that is written so."""
    text = text.strip()
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def written(name: str) -> str:
    """The name as properties have it."""
    return name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"'


def parts_of(text: str) -> list[str]:
    """What stands between the commas that are in no name."""
    return _BETWEEN.split(text) if text.strip() else []


def listed(text: str) -> list[str]:
    """Names between commas, as people write them; one with a comma in double quotes."""
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
