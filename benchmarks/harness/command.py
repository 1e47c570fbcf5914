"""A benchmark as `python -m benchmarks.NAME` runs it: its arguments, then its figures."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import FORKSERVER
from benchmarks.harness.report import Pane, draw
from dormouse.errors import pip_install
from dormouse.files.layout import LAYOUTS

Figures = dict[str, Any]
Tell = Callable[[str], None]
"""Shows what is being measured now, where somebody may be watching."""

LAYOUT = {"choices": LAYOUTS, "default": "file_table", "help": "of the tables [file_table]"}


@dataclass(frozen=True)
class Benchmark:
    """A question, how it is measured, and how the figures are shown."""

    name: str
    question: str | None
    """The docstring of its module."""
    measure: Callable[[Namespace, Tell], Figures]
    text: Callable[[Figures], str]
    panes: Callable[[Figures], list[Pane]] | None = None
    """What --plot draws."""
    quick: str = "the same figures in under a minute"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its own arguments, as `add_argument` takes them."""
    needed: Sequence[str] = ()
    """Packages that must be installed."""
    preload: Sequence[str] = ()
    """Modules that its processes have from their start."""
    refusal: Callable[[Namespace], str | None] = lambda _: None
    """What is wrong with arguments that do not go together."""

    def main(self, given: list[str] | None = None) -> Figures:
        """Measures, and prints a table or one JSON object."""
        # SIGTERM ends this process as Python ends: what it started ends with it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        arguments = self.parse(given)
        FORKSERVER.set_forkserver_preload([*self.preload])
        found = self.measure(arguments, _tell if sys.stderr.isatty() and not arguments.json else _hide)
        if self.panes and arguments.plot:
            draw(self.panes(found), arguments.plot)
        print(json.dumps(found) if arguments.json else self.text(found))
        return found

    def parse(self, given: list[str] | None = None) -> Namespace:
        """The arguments; ends with one clear line when they are wrong or a package is missing."""
        parser = ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.question)
        parser.add_argument("--quick", action="store_true", help=self.quick)
        parser.add_argument("--json", action="store_true", help="one object on one line")
        if self.panes:
            parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
        for name, given_as in self.options.items():
            parser.add_argument(name, **given_as)
        arguments = parser.parse_args(given)
        plot = arguments.plot if self.panes else None
        if plot and plot.suffix not in {".svg", ".png"}:
            parser.error(f"--plot {plot}: the file's name must end in .svg or .png")
        if plot and not plot.absolute().parent.is_dir():
            parser.error(f"--plot {plot}: there is no folder {plot.parent}")
        needed = [*self.needed, "matplotlib"] if plot else self.needed
        if missing := [name for name in needed if find_spec(name) is None]:
            wanted = pip_install("local", "query", "benchmark")
            parser.error(f"not installed: {', '.join(missing)}; {wanted}")
        if refusal := self.refusal(arguments):
            parser.error(refusal)
        return arguments


def at_least_one(text: str) -> int:
    """An argument's type."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError("must be at least 1")
    return number


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _hide(_: str) -> None:
    pass
