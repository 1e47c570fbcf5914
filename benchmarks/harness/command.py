"""The command `python -m benchmarks.NAME`: parses the arguments, measures, and prints the figures."""

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
from benchmarks.harness.report import Grid, Pane, draw, flat, keys_of, rendered
from dormouse.errors import pip_install
from dormouse.state.files.layout import LAYOUTS

Figures = dict[str, Any]
Tell = Callable[[str], None]
"""A function that shows on a terminal what is being measured now."""
P = TypeVar("P")


def amount(whole: Any, quick: Any = None, **argument: Any) -> Any:
    """Returns a dataclass field of a plan, with its full value and its value for the option --quick.

    With parameters of `add_argument` in `argument`, the field is also a command-line option. The option is a
    number of at least 1, unless the parameters name another type, action or choices.
    """
    quick = whole if quick is None else quick
    return field(default=whole, metadata={"quick": quick, "argument": argument})


def layout() -> Any:
    """Returns the field of a plan that selects the layout of the tables."""
    return amount("file_table", choices=LAYOUTS, help="layout of the tables [file_table]")


def quick(plan: type[P]) -> P:
    """Returns the plan with the values for the option --quick."""
    made: Any = plan
    return plan(**{each.name: each.metadata["quick"] for each in fields(made)})


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its plan, the function that measures it, and the tables that show its figures."""

    name: str
    question: str | None
    """The docstring of the benchmark's module, which --help prints."""
    plan: type[Any]
    """A dataclass whose fields are made by `amount`."""
    measure: Callable[[Any, Tell], Figures]
    """A function that runs the plan and returns its figures."""
    figures: Sequence[str | Grid]
    """The printed lines and tables, which contain every figure.

    A line names figures in braces. It is omitted if one of them was not measured.
    """
    only_json: Sequence[str | Grid] = ()
    """Figures that only --json shows."""
    panes: Sequence[Pane] = ()
    """The diagrams that --plot draws."""
    needed: Sequence[str] = ()
    """Packages that must be installed."""
    preload: Sequence[str] = ()
    """Modules that are imported before the processes of the benchmark are forked."""
    refusal: Callable[[Namespace], str | None] = lambda _: None
    """A function that returns an error message if the arguments contradict each other, else None."""

    @property
    def keys(self) -> set[str]:
        """The keys of all figures. Keys of nested figures are joined by dots."""
        return {key for each in (*self.figures, *self.only_json) for key in keys_of(each)}

    def main(self, given: list[str] | None = None) -> Figures:
        """Measures, prints tables or one JSON object, and returns the figures.

        Exits with an error if a figure is in none of the tables.
        """
        # on SIGTERM, exit as Python does, so that the server and the child processes are ended too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        arguments = self.parse(given)
        FORKSERVER.set_forkserver_preload([*self.preload])
        tell = _tell if sys.stderr.isatty() and not arguments.json else _hide
        measured = self.measure(self.planned(arguments), tell)
        if arguments.plot:
            draw(self.panes, measured, arguments.plot)
        print(json.dumps(measured) if arguments.json else self.text(measured))
        if unknown := sorted(flat(measured).keys() - self.keys):
            sys.exit(f"not in the tables of figures: {', '.join(unknown)}")
        return measured

    def text(self, measured: Figures) -> str:
        """Returns the measured figures as tables and lines."""
        return "\n".join(text for each in self.figures if (text := rendered(each, flat(measured))))

    def planned(self, arguments: Namespace) -> Any:
        """Returns the plan that the arguments describe."""
        plan = quick(self.plan) if arguments.quick else self.plan()
        given = {each.name: getattr(arguments, each.name, None) for each in fields(self.plan)}
        return replace(plan, **{name: value for name, value in given.items() if value is not None})

    def parse(self, given: list[str] | None = None) -> Namespace:
        """Returns the parsed arguments. Exits with one line if they are wrong or a package is missing."""
        parser = ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.question)
        parser.set_defaults(plot=None)
        parser.add_argument(
            "--quick", action="store_true", help="measure less of everything, in under a minute"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
        if self.panes:
            parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures: .svg or .png")
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
    """Parses a whole number; raises ArgumentTypeError if it is less than 1."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError("must be at least 1")
    return number


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _hide(_: str) -> None:
    pass
