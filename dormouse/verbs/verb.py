"""A verb: an operation described once, of which every door is made.

To add an option to a verb, add a field with a docstring to its request, and an argument to the method of the
Python facade that its handler calls. `options` passes the field on; jobs, events, HTTP, the client and the
command line find it in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
"""The types of JSON that a field may have to be, by the error of pydantic."""

Place = Literal["lookups", "queries", "statements"]
"""Where the query service runs a verb: among short questions, queries by key, or SQL statements."""


class Request(BaseModel):
    """What a verb is asked with, in JSON. The docstring of a field is its help text at every door."""

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
    """An answer in JSON, which may get more fields."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Form:
    """How a field is written, where JSON, Python or a text write it in different ways. Stands in `Annotated`.

    None is written as it is. Doors that have texts, the command line and Spark, read them by `of_text`, which
    returns what JSON has; without it they read a field as its type tells. It may take a list of `texts`.
    """

    to_json: Callable[[Any], Any] = lambda value: value
    to_python: Callable[[Any], Any] = lambda value: value
    of_text: Callable[[Any], Any] | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class AsText:
    """How a field is written as a text: help in place of its docstring, which says how JSON has it."""

    help: str


@dataclass(frozen=True, slots=True)
class OfWire:
    """Stands in `Annotated` of a field that programs send for themselves; no person and no facade has it."""


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
"""Names of columns, in their order."""

Statement = Annotated[str, Form(_json_statement)]
"""A text of SQL."""

Parameters = Annotated[
    list[Any] | dict[str, Any] | None,
    Form(_json_parameters, parse_parameters, texts.parse_parameters, texts=True),
    AsText("NAME=VALUE for $NAME, or 1=VALUE for $1; as text, which takes the type it is for."),
]
"""The values of a statement's parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a door gives to a handler beside the request."""

    interruption: Interruption | None = None
    """Ends the reading, when another thread sets it."""

    sessions: Sessions | None = None
    """Where statements run, if not in this process."""

    progress: Progress = no_progress
    """Called with what is done, and of how much."""

    job: JobProgress | None = None
    """The job that the work is, if it is one."""

    rows_max: int | None = None
    """How many rows the door may answer with."""

    check_rows: Callable[[int], object] = lambda rows: None
    """Raises the door's error for more rows than that."""

    @property
    def its_job(self) -> JobProgress:
        """Returns the job, in what only jobs do."""
        if self.job is None:
            raise AssertionError("only a job does this")
        return self.job

    @property
    def is_again(self) -> bool:
        """Returns whether a worker that died may have done the work of the job already."""
        return self.job is not None and self.job.attempt > 1


Handler = Callable[[Any, Any, Call], Any]
"""Does what a request asks of an instance: returns rows (a reader of Arrow) or what `json_value` takes."""


def _table_is_there(instance: Any, asked: Any, call: Call) -> None:
    instance.table(asked.table)


@dataclass(frozen=True, slots=True)
class Job:
    """The verb as a job, started at every door that has jobs."""

    kind: str
    """What the job is called; verbs of one kind are told apart by the fields that their requests must
    have."""

    work: Handler | None = None
    """Does the work in place of the verb's handler; its result is an object of JSON."""

    check: Handler = _table_is_there
    """Raises what the job would fail with as soon as a worker takes it."""


@dataclass(frozen=True, slots=True)
class Http:
    """The verb as a path of the query service: POST, with the request's other fields as the body."""

    path: str
    """With fields of the request in braces."""

    kind: str
    """What metrics call its queries."""

    place: Callable[[Any], Place] = lambda asked: "queries"
    places: tuple[Place, ...] = ("queries",)
    """Those that `place` may choose for a request."""

    answer: type[Document] | None = None
    """The document that it answers with; None: rows, in the format that the client accepts."""

    handler: Handler | None = None
    """Answers in place of the verb's handler."""


@dataclass(frozen=True, slots=True)
class Verb:
    """An operation: its request, its handler, and the doors that have it."""

    name: str
    """As the command line has it, such as "table drop"."""

    request: type[Request]
    handler: Handler
    job: Job | None = None
    http: Http | None = None
    event: str | None = None
    """What an event of the lambdas for tables calls it, in its field `do`."""

    changes: bool = field(default=False, kw_only=True)
    """Whether it changes the instance: then only the lambda that may change tables has it."""


def options(request: Request, *without: str) -> dict[str, Any]:
    """Returns the fields of a request by name, as Python takes them, `without` some."""
    model, given = type(request), dict(request)
    forms = {name: form_of(model, name) or Form() for name in fields_of(model, *without) if name in given}
    return {
        name: None if given[name] is None else form.to_python(given[name]) for name, form in forms.items()
    }


def fields_of(model: type[BaseModel], *without: str) -> list[str]:
    """Returns the names of the fields that people write, `without` some."""
    fields = model.model_fields.items()
    return [name for name, field in fields if name not in without and OfWire() not in field.metadata]


def json_of(model: type[Request], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Python's values are in JSON, without those that are the default of their field.

    So a service of before, which knows nothing of a new option, takes requests that do without it.
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
    """Returns the arguments of a method, its `locals()` as it begins, without `self` and some others."""
    return {name: value for name, value in arguments.items() if name not in ("self", *without)}


def form_of(model: type[BaseModel], name: str) -> Form | None:
    """Returns how a field of a model is written, if it is not as JSON has its type."""
    return next((one for one in model.model_fields[name].metadata if isinstance(one, Form)), None)


def required(model: type[BaseModel]) -> list[str]:
    """Returns the names of the fields that a request must have."""
    return [name for name, field in model.model_fields.items() if field.is_required()]


def parse(model: type[R], given: object, what: str) -> R:
    """Returns a request; `InvalidInput` says what is wrong with it, `what` what it is."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = error.errors()
    for one in faults:
        if isinstance(reason := one.get("ctx", {}).get("error"), DormouseError):
            raise reason from None
        # what reads the fields of an event names them, and the types of JSON
        if what == EVENT and one["type"] in _JSON_TYPES:
            from dormouse.settings.lambdas import field as field_of

            field_of(given, ".".join(map(str, one["loc"])), _JSON_TYPES[one["type"]])
    raise InvalidInput(f"{what} is not valid: {'; '.join(_texts(faults, model.model_fields))}") from None


def _texts(faults: Iterable[Any], known: Iterable[str]) -> list[str]:
    """Returns what is wrong with a request, a text for each field, the first five."""
    found = []
    for one in list(faults)[:FAULTS_SHOWN_MAX]:
        said = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            said = f"there is no such field; there is {', '.join(known)}"
        found.append(f"{'.'.join(map(str, one['loc'])) or 'it'}: {said}")
    return found
