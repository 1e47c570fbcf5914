"""Where the files are that are no modules of this package: cdk.json, and the sources of what is uploaded."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).parent / "sources"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1]
"""Where it is installed, a folder beside this file, which setup.py fills; else the checkout."""
