"""Options of commands, derived from Python's signatures and the models of requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

import typer

OTHERWISE = {
    "ingest_id": ["--id"], "change_id": ["--id"], "edit_id": ["--id"], "parameters": ["--param"],
    "separator": ["--separator", "--delimiter"],
}  # fmt: skip
"""The names on a command line of fields whose option is not named after the field."""

WHOLE_MAX = (1 << 63) - 1
"""The largest 64-bit number. Help texts leave out a bound of this size."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def bounds(least: float | None, most: float | None = None) -> dict[str, Any]:
    """Returns the least and the greatest value of an option, for the annotation of a parameter."""
    return {"min": least, "max": most}


class Taken:
    """The parameters of a function as arguments and options for typer.

    Positional-only parameters become arguments, and all others become options. The text in an annotation is
    the help. Annotations for typer stay as they are. For a parameter that is a dataclass or a request model,
    each field becomes an option, unless the function has a parameter of that name. For
    `Annotated[dict, model]` the same options exist, and the function gets a dict of the given ones.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        taken = inspect.signature(function, eval_str=True).parameters
        self.options: list[inspect.Parameter] = []
        self.about = ""
        """The docstring of the first request model among the parameters."""
        self._made: dict[str, tuple[Any, list[str]]] = {}
        for name, parameter in list(taken.items())[1:]:
            fields = _options_of_fields(parameter.annotation)
            if fields is None:
                self.options.append(_option(parameter))
                continue
            known = {*taken, *(option.name for option in self.options)}
            fields = [option for option in fields if option.name not in known]
            self.options += fields
            self._made[name] = parameter.annotation, [option.name for option in fields]
            self.about = self.about or inspect.getdoc(parameter.annotation) or ""
        self._by_position = [name for name, each in taken.items() if each.kind is each.POSITIONAL_ONLY][1:]

    def bind(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Converts the values of the options to the function's positional and keyword arguments."""
        for name, (kind, fields) in self._made.items():
            given[name] = _made(kind, {field: given.pop(field) for field in fields})
        return [given.pop(name) for name in self._by_position], given


def options_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns a function's parameters in the form that typer reads, all keyword-only."""
    return [_option(each) for each in inspect.signature(function, eval_str=True).parameters.values()]


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    by_name = parameter.replace(kind=_BY_NAME)
    if get_origin(parameter.annotation) is not Annotated:
        return by_name
    kind, *notes = get_args(parameter.annotation)
    helps = [note for note in notes if isinstance(note, str)]
    if not helps:
        return by_name
    how = {name: value for note in notes if isinstance(note, dict) for name, value in note.items()}
    if parameter.kind is parameter.POSITIONAL_ONLY:
        made = typer.Argument(help=helps[0], **how)
    else:
        made = typer.Option(*_names(parameter.name, kind, parameter.default), help=helps[0], **how)
    return by_name.replace(annotation=Annotated[kind, made])


def _names(name: str, kind: Any, default: Any) -> list[str]:
    """Returns the names of an option, or an empty list if typer should choose them.

    Gives flags a name because typer would add a `--no-` form to them.
    """
    if name in OTHERWISE:
        return OTHERWISE[name]
    is_flag = kind is bool and default is False
    return [f"--{name.strip('_').replace('_', '-')}"] if is_flag or name.endswith("_") else []


def _settings_of(kind: Any) -> Any:
    """Returns the model in an annotation `Annotated[dict, model]`, or None for other annotations."""
    return next((note for note in get_args(kind) if hasattr(note, "model_fields")), None)


def _options_of_fields(kind: Any) -> list[inspect.Parameter] | None:
    """Returns an option for each field of a dataclass or model; None for another kind of annotation.

    Secrets get no option, because other users of the machine can see command lines.
    """
    if is_dataclass(kind):
        return options_of(kind)  # type: ignore[arg-type]
    settings = _settings_of(kind)
    model = kind if hasattr(kind, "model_fields") else settings
    if model is None:
        return None
    from dormouse.verbs.verb import fields_of

    fields = {name: model.model_fields[name] for name in fields_of(model)}
    # the environment may set other defaults
    shown = settings is not None and "env_prefix" in model.model_config
    return [
        _of_field(name, field, optional=settings is not None, default_shown=shown)
        for name, field in fields.items()
        if field.repr
    ]


def _of_field(name: str, field: Any, *, optional: bool, default_shown: bool) -> inspect.Parameter:
    """Returns an option for a field of a model, or an argument if the field is required.

    An `optional` field has the default None, which means that it was not given.
    """
    from dormouse.verbs.verb import AsText

    form, notes = _form(field), field.metadata
    kind = field.annotation if form is None else list[str] if form.texts else str
    kind = list[str] if get_origin(kind) is tuple else kind
    default = None if form is not None or optional or field.is_required() else field.get_default()
    text = next((note.help for note in notes if isinstance(note, AsText)), field.description or "")
    text = " ".join(text.split())
    limits = {"ge": "min", "le": "max"}
    how = {
        ours: getattr(note, bound) for bound, ours in limits.items() for note in notes if hasattr(note, bound)
    }
    how = {ours: value for ours, value in how.items() if value < WHOLE_MAX}
    if field.is_required() and not optional:
        return inspect.Parameter(name, _BY_NAME, annotation=Annotated[kind, typer.Argument(help=text, **how)])
    if optional:
        how = {}
        text += f" [{field.default}]" if default_shown and field.default is not None else ""
    if default is None:
        kind |= None
    made = typer.Option(*_names(name, kind, default), help=text, **how)
    return inspect.Parameter(name, _BY_NAME, default=default, annotation=Annotated[kind, made])


def _form(field: Any) -> Any:
    """Returns the parser of a field's text on the command line, or None if the field's type parses it."""
    return next((note for note in field.metadata if getattr(note, "of_text", None) is not None), None)


def _made(kind: Any, given: dict[str, Any]) -> Any:
    """Returns a dict, a dataclass or a request made from the values of several options.

    Typer has checked their types and bounds. A request is checked only if it has all required fields; the
    function may add a missing one later.
    """
    if _settings_of(kind) is not None:
        return {name: value for name, value in given.items() if value is not None}
    if is_dataclass(kind):
        return kind(**given)  # type: ignore[operator]
    from dormouse.cli.parsing import parse_moment
    from dormouse.verbs.verb import MOMENT, parse, required

    for name, value in given.items():
        form = _form(kind.model_fields[name])
        if form is not None and value is not None:
            given[name] = form.to_json(parse_moment(value)) if form is MOMENT else form.of_text(value)
    is_whole = given.keys() >= {*required(kind)}
    return parse(kind, given, "the command") if is_whole else kind.model_construct(**given)


def declare(run: Callable[..., Any], options: Iterable[inspect.Parameter]) -> None:
    """Sets the signature of a function `(**given)`, so that typer finds these options."""
    listed = list(options)
    run.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in listed}
