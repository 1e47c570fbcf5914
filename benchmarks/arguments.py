"""Arguments that benchmarks share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from dormouse.errors import pip_install


def check_plot(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Ends with one clear line when nothing can be drawn there, before anything is measured."""
    if path is None:
        return
    if path.suffix not in {".svg", ".png"}:
        parser.error(f"--plot {path}: the file's name must end in .svg or .png")
    if not path.absolute().parent.is_dir():
        parser.error(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        parser.error(f"not installed: matplotlib; {pip_install('benchmark')}")
