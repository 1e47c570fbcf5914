"""How the commands say numbers."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """The number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
