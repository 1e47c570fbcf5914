"""A benchmark as `python -m benchmarks.NAME` runs it: its arguments, then its figures."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.processes import FORKSERVER
from benchmarks.harness.report import Grid, Pane, draw, flat, keys_of, shown
from dormouse.errors import pip_install
from dormouse.state.files.layout import LAYOUTS

Figures = dict[str, Any]
Tell = Callable[[str], None]
"""Shows what is being measured now, where somebody may be watching."""
P = TypeVar("P")


def amount(whole: Any, quick: Any = None, **argument: Any) -> Any:
    """A field of a plan: how much is done, or what; and with --quick.

    With a `help` it is an argument, too: a number, unless it is said otherwise as `add_argument` takes it.
    """
    quick = whole if quick is None else quick
    return field(default=whole, metadata={"quick": quick, "argument": argument})


def layout() -> Any:
    """The layout of the tables, as a field of a plan."""
    return amount("file_table", choices=LAYOUTS, help="of the tables [file_table]")


def quick(plan: type[P]) -> P:
    """The plan with --quick."""
    made: Any = plan
    return plan(**{each.name: each.metadata["quick"] for each in fields(made)})


@dataclass(frozen=True)
class Benchmark:
    """A question, how it is measured, and what the figures mean."""

    name: str
    question: str | None
    """The docstring of its module."""
    plan: type[Any]
    """A dataclass whose fields are made by `amount`."""
    measure: Callable[[Any, Tell], Figures]
    """Carries the plan out."""
    figures: Sequence[str | Grid]
    """Every figure, as it is shown. Lines have figures in braces, and are left out where there are none."""
    only_json: Sequence[str | Grid] = ()
    """Those that only --json shows."""
    panes: Sequence[Pane] = ()
    """What --plot draws."""
    needed: Sequence[str] = ()
    """Packages that must be installed."""
    preload: Sequence[str] = ()
    """Modules that its processes have from their start."""
    refusal: Callable[[Namespace], str | None] = lambda _: None
    """What is wrong with arguments that do not go together."""

    @property
    def keys(self) -> set[str]:
        """Of all figures; those of figures in figures are joined by dots."""
        return {key for each in (*self.figures, *self.only_json) for key in keys_of(each)}

    def main(self, given: list[str] | None = None) -> Figures:
        """Measures, and prints tables or one JSON object; ends with an error when a figure has no meaning."""
        # SIGTERM ends this process as Python ends: what it started ends with it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        arguments = self.parse(given)
        FORKSERVER.set_forkserver_preload([*self.preload])
        tell = _tell if sys.stderr.isatty() and not arguments.json else _hide
        found = self.measure(self.planned(arguments), tell)
        if arguments.plot:
            draw(self.panes, found, arguments.plot)
        print(json.dumps(found) if arguments.json else self.text(found))
        if unknown := sorted(flat(found).keys() - self.keys):
            sys.exit(f"not in the tables of figures: {', '.join(unknown)}")
        return found

    def text(self, found: Figures) -> str:
        """The figures that there are, in tables and lines."""
        return "\n".join(text for each in self.figures if (text := shown(each, flat(found))))

    def planned(self, arguments: Namespace) -> Any:
        """The plan of the arguments."""
        plan = quick(self.plan) if arguments.quick else self.plan()
        given = {each.name: getattr(arguments, each.name, None) for each in fields(self.plan)}
        return replace(plan, **{name: value for name, value in given.items() if value is not None})

    def parse(self, given: list[str] | None = None) -> Namespace:
        """The arguments; ends with one clear line when they are wrong or a package is missing."""
        parser = ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.question)
        parser.set_defaults(plot=None)
        parser.add_argument("--quick", action="store_true", help="less of everything, in under a minute")
        parser.add_argument("--json", action="store_true", help="one object on one line")
        if self.panes:
            parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
        for each in fields(self.plan):
            if argument := each.metadata["argument"]:
                number: dict[str, Any] = (
                    {} if argument.keys() & {"action", "choices", "type"} else {"type": at_least_one}
                )
                parser.add_argument(f"--{each.name}", default=None, **number, **argument)
        arguments = parser.parse_args(given)
        if refusal := self._refusal(arguments):
            parser.error(refusal)
        return arguments

    def _refusal(self, arguments: Namespace) -> str | None:
        plot = arguments.plot
        if plot and plot.suffix not in {".svg", ".png"}:
            return f"--plot {plot}: the file's name must end in .svg or .png"
        if plot and not plot.absolute().parent.is_dir():
            return f"--plot {plot}: there is no folder {plot.parent}"
        needed = [*self.needed, "matplotlib"] if plot else self.needed
        if missing := [name for name in needed if find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}; {pip_install('local', 'query', 'benchmark')}"
        return self.refusal(arguments)


def at_least_one(text: str) -> int:
    """An argument's type."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError("must be at least 1")
    return number


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _hide(_: str) -> None:
    pass
