"""What all commands share: which instance, text or JSON, and how errors end."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dormouse.cli.failures import printable, report
from dormouse.errors import InvalidInput, NotAnInstance
from dormouse.model.json_values import json_value
from dormouse.model.table import Engine as Engine  # noqa: PLC0414
from dormouse.model.text import plural as plural  # noqa: PLC0414
from dormouse.settings.process import load_settings

if TYPE_CHECKING:
    from dormouse.api.instance import Instance

T = TypeVar("T")
DEFAULT_FOLDER = Path("lake")
ParamOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE for $NAME, or 1=VALUE for $1; as text, which takes the type it is for."),
]
EngineOption = Annotated[Engine, typer.Option(help="auto: Spark on a cluster, here else.")]
TableName = Annotated[str, typer.Argument(help="The table.", show_default=False)]

_OF_ALL = {"as_json", "debug"}
_OF_DEPLOYED = {"region", "profile"}
Region = Annotated[str | None, typer.Option(help="The AWS region [AWS_REGION, or the profile's].")]
Profile = Annotated[str | None, typer.Option(help="The AWS profile [AWS_PROFILE].")]


@dataclass(frozen=True)
class Session:
    """One run of a command: its fields are the options that commands share."""

    instance: Annotated[
        Path | None,
        typer.Option(
            "--instance",
            "-i",
            help="The folder of an embedded instance [DORMOUSE_INSTANCE, else ./lake]; of `table` and "
            "`status` also the id of a deployed one.",
        ),
    ] = None
    dsn: Annotated[
        str | None, typer.Option("--dsn", help="A PostgreSQL to connect to; with --objects [DORMOUSE_DSN].")
    ] = None
    objects: Annotated[
        str | None,
        typer.Option(
            "--objects", help="An object store: s3://bucket/prefix or file:///path [DORMOUSE_OBJECTS]."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="A traceback when something fails.")] = False
    region: Region = None
    profile: Profile = None

    def open(self, *, read_only: bool = False, create: bool = False) -> Instance:
        """The instance that the options and settings name; made only when told so."""
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
        """The instance; one that is not there is made after `first`, whose result comes with it."""
        try:
            return self.open(), None
        except NotAnInstance:
            found = first()
            return self.open(create=True), found

    def show(self, value: Any, text: Callable[[], Any]) -> None:
        """The value as JSON, or what `text` makes of it: a line, or something that rich renders."""
        if self.as_json:
            sys.stdout.write(json.dumps(json_value(value)) + "\n")
            sys.stdout.flush()
        else:
            from dormouse.cli.console import stdout

            shown = text()
            if is_line := isinstance(shown, str):
                shown = printable(shown)
            # a line may name what is in brackets: a column, an extra
            stdout().print(shown, highlight=False, soft_wrap=True, markup=not is_line)


def verb(
    app: typer.Typer, name: str, *, example: str, opens: bool = True, deployed: bool = False, more: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function `(session, …)`, with the options that all share; `more` ends its help.

    Unless it `opens` an instance, it has no options to name one; if that may be `deployed`, also where."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        left_out = set() if deployed else _OF_DEPLOYED
        shared = [
            option
            for option in _options(Session)
            if (opens or option.name in _OF_ALL) and option.name not in left_out
        ]
        options = _options(function)[1:] + shared

        @functools.wraps(function)
        def command(**given: Any) -> None:
            session = Session(**{option.name: given.pop(option.name) for option in shared})
            try:
                function(session, **given)
                sys.stdout.flush()
            except (typer.TyperException, typer.Exit):
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(report(error, debug=session.debug)) from None

        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in options}
        app.command(name, help=f"{inspect.getdoc(function)}{more}", epilog=f"Example: {example}")(command)
        return function

    return decorate


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function takes, each by name."""
    given = inspect.signature(function, eval_str=True).parameters.values()
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in given]


def agreed(doing: str, question: str) -> bool:
    """Asks a person, whether to do it; `InvalidInput` where there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(f"--yes is needed to {doing}, as nobody can be asked here")
    return confirmed(question)


def confirmed(question: str, *, default: bool = False) -> bool:
    """What a person answers; to end the input is a no."""
    try:
        return typer.confirm(question, default=default, err=True)
    except typer.Abort:
        return False
