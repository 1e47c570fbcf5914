"""The description of a verb, from which all its doors are made: Python, HTTP, the command line, jobs.

To add an option to a verb, add a field with a docstring to its request, and an argument to the method of the
Python facade that its handler calls. `options` passes the field to that method. Jobs, events, HTTP, the
client and the command line find the field in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dormouse.errors import DormouseError, InvalidInput, InvalidQuery
from dormouse.model.cut import text_of_when, when_of_text
from dormouse.model.json_values import parameters_json, parse_parameters
from dormouse.model.loops import Progress, no_progress
from dormouse.model.text import split_names
from dormouse.model.types import checked_parameters
from dormouse.verbs import texts

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.jobs.runs import Progress as JobProgress
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.streams import Interruption

R = TypeVar("R", bound="Request")
FAULTS_SHOWN_MAX = 5
EVENT = "the event"
_JSON_TYPES = {
    "missing": object, "string_type": str, "int_type": int, "bool_type": bool, "list_type": list,
    "dict_type": dict,
}  # fmt: skip
"""The type that a field must have, by the kind of pydantic's error."""

Place = Literal["lookups", "queries", "statements"]
"""The pool of the query service that runs a verb: short look-ups, queries by key, or SQL statements."""


class Request(BaseModel):
    """The request of a verb, in JSON. The docstring of a field is its help text at every door."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        for one in cls.model_fields.values():
            one.description = one.description and " ".join(one.description.split())


class OfTable(Request):
    """A request about one table."""

    table: str = Field(examples=["flights"])
    """The name of a table."""


class Document(BaseModel):
    """An answer in JSON. Later versions may add fields."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Form:
    """The conversions of a field between JSON, Python and text, given in `Annotated`.

    None is never converted. The command line and Spark parse texts with `of_text`, which returns the JSON
    form. If it is None, they parse texts by the field's type. If `texts` is true, `of_text` takes a list of
    texts.
    """

    to_json: Callable[[Any], Any] = lambda value: value
    to_python: Callable[[Any], Any] = lambda value: value
    of_text: Callable[[Any], Any] | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class AsText:
    """The help for a field on the command line, where its text differs from the JSON in its docstring."""

    help: str


@dataclass(frozen=True, slots=True)
class OfWire:
    """A mark, in `Annotated`, of a field that only programs send: no option of commands or Python methods."""


def _python_when(when: Any) -> Any:
    return when_of_text(when) if isinstance(when, str) else when


def _json_statement(statement: object) -> str:
    if not isinstance(statement, str):
        raise InvalidQuery(f"a statement must be a string, not {statement!r}")
    return statement


def _json_parameters(parameters: Any) -> Any:
    return parameters_json(checked_parameters(parameters))


MOMENT = Form(text_of_when, _python_when, str)
When = Annotated[str | int | None, MOMENT]
"""A moment: a time in ISO 8601 with its offset, the name of a cut, or a cut's number."""

Columns = Annotated[list[str] | None, Form(list, list, split_names)]
"""The names of columns, in the wanted order."""

Statement = Annotated[str, Form(_json_statement)]
"""An SQL statement."""

Parameters = Annotated[
    list[Any] | dict[str, Any] | None,
    Form(_json_parameters, parse_parameters, texts.parse_parameters, texts=True),
    AsText("NAME=VALUE for $NAME, or 1=VALUE for $1; SQL converts the text to the type that it needs."),
]
"""The values of a statement's parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """The context that a door passes to a handler together with the request."""

    interruption: Interruption | None = None
    """An interruption that ends reads when another thread sets it."""

    sessions: Sessions | None = None
    """The processes in which statements run. If it is None, they run in this process."""

    progress: Progress = no_progress
    """A callback that gets the amount of work done, and the total if it is known."""

    job: JobProgress | None = None
    """The job that runs this work, if any."""

    rows_max: int | None = None
    """The largest number of rows in an answer, or None for no limit."""

    remembered: dict[str, Table] | None = None
    """The tables of earlier requests by name, if the door remembers them, so that a query need not look up
    its table. Its plan then checks that the name, the columns and the properties are still the same."""

    check_rows: Callable[[int], object] = lambda rows: None
    """A function of a number of rows that raises the door's error if an answer may not have so many."""

    @property
    def its_job(self) -> JobProgress:
        """The job that runs this work, for handlers that only jobs use."""
        if self.job is None:
            raise AssertionError("only a job does this")
        return self.job

    @property
    def is_again(self) -> bool:
        """True if a dead worker may have done this job's work already."""
        return self.job is not None and self.job.attempt > 1


Handler = Callable[[Any, Any, Call], Any]
"""A function of an instance, a request and a call that carries out the request.

It returns an Arrow reader, or a value that `json_value` can convert.
"""


def _table_is_there(instance: Any, request: Any, call: Call) -> None:
    instance.table(request.table)


@dataclass(frozen=True, slots=True)
class Job:
    """The description of a verb as a kind of job."""

    kind: str
    """The kind of the job. Verbs of one kind are distinguished by the required fields of their
    requests."""

    work: Handler | None = None
    """A handler that does the work instead of the verb's handler, and returns a JSON object."""

    check: Handler = _table_is_there
    """A handler that raises an error if the job would fail as soon as a worker takes it."""


@dataclass(frozen=True, slots=True)
class Http:
    """The description of a verb as a path of the query service.

    The method is POST. The body has the fields that are not in the path.
    """

    path: str
    """The path, with fields of the request in braces."""

    kind: str
    """The name of the verb's queries in metrics."""

    place: Callable[[Any], Place] = lambda request: "queries"
    places: tuple[Place, ...] = ("queries",)
    """The pools that `place` can choose for a request."""

    answer: type[Document] | None = None
    """The model of the answer. None means rows, in a format that the client accepts."""

    handler: Handler | None = None
    """A handler that answers instead of the verb's handler."""

    right: Literal["holder", "writes"] = "holder"
    """The right that the path requires: any token, or one for SQL that writes."""


@dataclass(frozen=True, slots=True)
class Verb:
    """An operation of Dormouse: its request, its handler, and the ways to call it."""

    name: str
    """The name, as on the command line, such as "table drop"."""

    request: type[Request]
    handler: Handler
    job: Job | None = None
    http: Http | None = None
    event: str | None = None
    """The value of the field `do` in an event of the lambdas for tables."""

    changes: bool = field(default=False, kw_only=True)
    """True if the verb changes the instance. Only the lambda for changes accepts such verbs."""


def options(request: Request, *without: str) -> dict[str, Any]:
    """Returns the fields of a request as arguments for Python methods, except those in `without`."""
    given = dict(request)
    return {
        name: None if given[name] is None else form.to_python(given[name])
        for name, form in _forms(type(request), without)
        if name in given
    }


@cache
def _forms(model: type[BaseModel], without: tuple[str, ...]) -> list[tuple[str, Form]]:
    return [(name, form_of(model, name) or Form()) for name in fields_of(model, *without)]


def fields_of(model: type[BaseModel], *without: str) -> list[str]:
    """Returns the names of a request's fields, without those that only programs send and `without`."""
    fields = model.model_fields.items()
    return [name for name, field in fields if name not in without and OfWire() not in field.metadata]


def json_of(model: type[Request], given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts arguments of a Python method to the JSON of a request, without values that are defaults.

    So an older service, which does not know a new option, accepts requests that do not use the option.
    """
    found = {}
    for name, value in given.items():
        form, field = form_of(model, name), model.model_fields[name]
        is_left_out = value is None and not field.is_required()
        written = value if form is None or is_left_out else form.to_json(value)
        if field.is_required() or written != field.get_default(call_default_factory=True):
            found[name] = written
    return found


def of_call(arguments: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Returns a method's arguments, from its `locals()`, without `self` and those in `without`."""
    return {name: value for name, value in arguments.items() if name not in ("self", *without)}


def form_of(model: type[BaseModel], name: str) -> Form | None:
    """Returns the conversions of a field, or None if its Python value is its JSON value."""
    return next((one for one in model.model_fields[name].metadata if isinstance(one, Form)), None)


def required(model: type[BaseModel]) -> list[str]:
    """Returns the names of the required fields."""
    return [name for name, field in model.model_fields.items() if field.is_required()]


def parse(model: type[R], given: object, what: str) -> R:
    """Parses a request. Raises `InvalidInput` for an invalid one; `what` names it in the message."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = error.errors()
    for one in faults:
        if isinstance(reason := one.get("ctx", {}).get("error"), DormouseError):
            raise reason from None
        # validators of fields name the field and the JSON type themselves
        if what == EVENT and one["type"] in _JSON_TYPES:
            from dormouse.settings.lambdas import field as field_of

            field_of(given, ".".join(map(str, one["loc"])), _JSON_TYPES[one["type"]])
    raise InvalidInput(f"{what} is not valid: {'; '.join(_texts(faults, model.model_fields))}") from None


def _texts(faults: Iterable[Any], known: Iterable[str]) -> list[str]:
    """Returns a text for each of the first five faulty fields of a request."""
    found = []
    for one in list(faults)[:FAULTS_SHOWN_MAX]:
        said = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            said = f"there is no such field; there is {', '.join(known)}"
        found.append(f"{'.'.join(map(str, one['loc'])) or 'it'}: {said}")
    return found
