"""The base of all commands: their instance, common options, questions, text or JSON output, and errors."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from dormouse.cli.console import CELL_CHARACTERS_MAX, grid, progress, stdout
from dormouse.cli.failures import printable, report
from dormouse.cli.options import Taken, declare, options_of
from dormouse.errors import InvalidInput, NotAnInstance
from dormouse.model.json_values import json_value
from dormouse.model.loops import Progress
from dormouse.model.text import plural as plural  # noqa: PLC0414

if TYPE_CHECKING:
    from dormouse.api.instance import Instance

T = TypeVar("T")
DEFAULT_FOLDER = Path("lake")
TableName = Annotated[str, "The table."]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, "Show what would be done, and change nothing."]
Region = Annotated[str | None, "The AWS region [AWS_REGION, or the profile's]."]
Profile = Annotated[str | None, "The AWS profile [AWS_PROFILE]."]

InstanceId = Annotated[str, typer.Option("--instance", "-i", help="The id of a deployed instance.")]

On = Literal["instance", "any", "deployed", "none"]
"""The kind of instance that a command works on.

- "instance": an instance that the command opens.
- "any": such an instance, or a deployed one.
- "deployed": a deployed instance.
- "none": no instance.
"""
_SHARED: dict[On, tuple[str, ...]] = {
    "instance": ("instance", "dsn", "objects"),
    "any": ("instance", "dsn", "objects", "region", "profile"),
    "deployed": ("instance", "region", "profile"),
    "none": (),
}


@dataclass(frozen=True)
class Session:
    """One run of a command. Its fields are the options that all commands share."""

    instance: Annotated[
        Path | None,
        typer.Option(
            "--instance",
            "-i",
            help="The folder of an embedded instance [DORMOUSE_INSTANCE, else ./lake]; `table` and "
            "`status` also take the id of a deployed one.",
        ),
    ] = None
    dsn: Annotated[str | None, "The PostgreSQL database; with --objects [DORMOUSE_DSN]."] = None
    objects: Annotated[
        str | None, "An object store: s3://bucket/prefix or file:///path [DORMOUSE_OBJECTS]."
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")] = False
    debug: Annotated[bool, "Print a traceback when something fails."] = False
    region: Region = None
    profile: Profile = None

    def open(self, *, read_only: bool = False, create: bool = False) -> Instance:
        """Opens the instance that the options or the settings name. With `create`, creates a missing one.

        Raises `NotAnInstance` if there is none, and `InvalidInput` for options that contradict each other.
        """
        from dormouse.settings.process import load_settings

        settings = load_settings()
        objects = self.objects or (settings.objects if self.instance is None else None)
        if objects is not None or self.dsn is not None:
            from dormouse.api.instance import connect

            dsn = self.dsn or settings.dsn
            if dsn is None or objects is None:
                raise InvalidInput("--dsn and --objects go together: give both, or --instance FOLDER")
            if self.instance is not None:
                raise InvalidInput("give --instance, or --dsn and --objects, not both")
            return connect(dsn, objects, read_only=read_only)
        from dormouse.embedded.local import local, prepare

        folder = (self.instance or settings.instance or DEFAULT_FOLDER).expanduser()
        if not create and not folder.exists():
            raise NotAnInstance(
                f"there is no instance in {folder}: name one with --instance, or make one with "
                "'dormouse table create' or 'dormouse demo'; for a deployed one run first "
                'eval "$(dormouse env --instance ID)"'
            )
        if not create:
            prepare(folder, read_only=True)
        return local(folder, read_only=read_only)

    def open_or_make(self, first: Callable[[], T]) -> tuple[Instance, T | None]:
        """Opens the instance, and returns it and None.

        If there is no instance, calls `first`, creates the instance, and returns it and the result of
        `first`.
        """
        try:
            return self.open(), None
        except NotAnInstance:
            result = first()
            return self.open(create=True), result

    @contextmanager
    def work(self, doing: str, unit: str, *, read_only: bool = False) -> Iterator[tuple[Instance, Progress]]:
        """Opens the instance with a progress bar. Yields the instance and a function to move the bar."""
        with self.open(read_only=read_only) as instance, progress(doing, unit=unit) as moved:
            yield instance, moved

    def show(self, value: Any, text: str | Callable[[], Any]) -> None:
        """Prints `value` as JSON with --json, or else `text`.

        `text` can be a function that returns a text, or an object that rich renders.
        """
        if self.as_json:
            sys.stdout.write(json.dumps(json_value(value)) + "\n")
            sys.stdout.flush()
            return
        shown = text if isinstance(text, str) else text()
        if is_line := isinstance(shown, str):
            shown = printable(shown)
        # a line may name what is in brackets: a column, an extra
        stdout().print(shown, highlight=False, soft_wrap=True, markup=not is_line)

    def table(
        self,
        value: Any,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *below: str,
        empty: str = "",
        cell_characters_max: int = CELL_CHARACTERS_MAX,
    ) -> None:
        """Prints `value` as JSON with --json, or else a table of `rows`.

        The lines `below` follow the table. If there are no rows, `empty` stands in place of the table.
        """

        def shown() -> Any:
            from rich.console import Group
            from rich.text import Text

            cells = list(rows)
            if not cells:
                return "\n".join([empty, *below] if empty else below)
            # no markup: a name may have brackets
            lines = [Text(printable(line)) for line in below]
            return Group(grid(columns, cells, cell_characters_max=cell_characters_max), *lines)

        self.show(value, shown)

    def lines(self, value: Any, lines: Iterable[str], *, empty: str = "") -> None:
        """Prints `value` as JSON with --json, or else the lines. Prints `empty` if there are no lines."""
        self.show(value, lambda: "\n".join(lines) or empty)


def group(name: str | None = None, help: str | None = None) -> typer.Typer:
    """Returns an empty group of commands. Commands of a group without a name follow `dormouse` directly."""
    return typer.Typer(name=name, help=help, no_args_is_help=name is not None, rich_markup_mode=None)


def command(
    app: typer.Typer, *, example: str = "", on: On = "instance", more: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds a function `(session, …)` to `app` as a command of the same name.

    The function's positional-only parameters become arguments, and all others become options. The text in an
    annotation is the help of the option. The docstring is the help of the command, by default that of the
    request among the parameters.

    - `example`: the text after the command's name, or a whole command line, for the help.
    - `on`: the kind of instance, which decides the shared options that name it.
    - `more`: a text to append to the help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shared = [each for each in options_of(Session) if each.name in (*_SHARED[on], "as_json", "debug")]
        if on == "deployed":
            of_id = inspect.Parameter("instance", inspect.Parameter.KEYWORD_ONLY, annotation=InstanceId)
            shared = [of_id if each.name == "instance" else each for each in shared]
        own = Taken(function)

        @functools.wraps(function)
        def run(**given: Any) -> None:
            session = Session(**{option.name: given.pop(option.name) for option in shared})
            try:
                by_position, by_name = own.bind(given)
                function(session, *by_position, **by_name)
                sys.stdout.flush()
            except (typer.TyperException, typer.Exit):
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(report(error, debug=session.debug)) from None

        declare(run, [*own.options, *shared])
        about = inspect.getdoc(function) or own.about
        name = function.__name__.strip("_").replace("_", "-")
        words = ["dormouse", app.info.name, name, example]
        line = example if "dormouse " in example else " ".join(word for word in words if word)
        app.command(name, help=f"{about}{more}", epilog=f"Example: {line}")(run)
        return function

    return decorate


def ask(yes: bool, doing: str, *, done: str, question: str | None = None) -> None:
    """Asks the user for consent, unless `yes`; raises `InvalidInput` if the user refuses."""
    if not (yes or agreed(doing, question or f"{doing[0].upper()}{doing[1:]}?")):
        raise InvalidInput(f"nothing was {done}")


def agreed(doing: str, question: str) -> bool:
    """Returns whether the user consents; raises `InvalidInput` without a terminal to ask on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(f"--yes is needed to {doing}, because there is no terminal to ask on")
    return confirmed(question)


def confirmed(question: str, *, default: bool = False) -> bool:
    """Returns the user's answer to a yes-or-no question; the end of the input means no."""
    try:
        return typer.confirm(question, default=default, err=True)
    except typer.Abort:
        return False
