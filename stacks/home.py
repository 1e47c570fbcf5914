"""The folder of files that are not modules of this package: cdk.json, and the sources of uploaded files."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).parent / "sources"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1]
"""The folder `sources` beside this file, which setup.py fills, in an installed package; otherwise the
checkout."""
