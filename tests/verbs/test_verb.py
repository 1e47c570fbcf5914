"""A new option of a verb, which works at every door: jobs, events, HTTP, the client, commands, Spark."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Annotated, Any

import httpx
import pytest
import typer

from dormouse.cli.command import Session, command, group
from dormouse.client.http import Http as Connections
from dormouse.client.http import ask
from dormouse.datasource.options import check_known, parsed
from dormouse.errors import InvalidInput
from tests.serving import serving
from tests.standard import OF_K
from tests.support.api import Instance
from tests.support.verbs import (
    VERBS,
    Call,
    Document,
    Form,
    Http,
    Job,
    OfWire,
    Request,
    Verb,
    check_request,
    fields_of,
    functions,
    json_of,
    options,
    tables,
)


class ProbeRequest(Request):
    """Ask a table how it is."""

    table: str
    """The name of a table."""

    mark: Annotated[str | None, OfWire()] = None
    """A value that only programs send."""


class LoudProbeRequest(ProbeRequest):
    __doc__ = ProbeRequest.__doc__

    loud: Annotated[str | None, Form(to_json=str.upper, to_python=str.lower)] = None
    """The loudness of
    the answer."""


class Probed(Document):
    """The answer to a probe."""

    table: str


def probe(instance: Instance, request: Any, call: Call) -> dict[str, Any]:
    return {"table": instance.table(request.table).name, "options": options(request, "table")}


def verb_of(request: type[Request]) -> Verb:
    http = Http("/v1/tables/{table}/probe", "probe", answer=Probed)
    return Verb("probe", request, probe, job=Job("probe"), http=http, event="probe")


BEFORE, AFTER = verb_of(ProbeRequest), verb_of(LoudProbeRequest)
ASKED = {"table": "t", "loud": "WHISPER"}
ANSWERED = {"table": "t", "options": {"loud": "whisper"}}


@pytest.fixture
def served(instance: Instance) -> Iterator[Instance]:
    instance.create_table("t", OF_K)
    yield instance


def as_job(instance: Instance, request: dict[str, Any]) -> Any:
    check_request(instance, "probe", request)
    job_id = instance.jobs.start("probe", request)
    instance.jobs.worker(functions(instance)).run(drain=True)
    return instance.jobs.result(job_id)


def as_event(instance: Instance, request: dict[str, Any]) -> Any:
    return tables.answer(instance, *tables.parse_event({"do": "probe", **request}, [VERBS["probe"]]))


def over_http(instance: Instance, request: dict[str, Any]) -> Any:
    with serving(instance) as url:
        body = {name: value for name, value in request.items() if name != "table"}
        answer = httpx.post(f"{url}/v1/tables/{request['table']}/probe", json=body)
    if answer.status_code == 400:
        raise InvalidInput(answer.json()["detail"])
    return answer.json()


def by_client(instance: Instance, request: dict[str, Any]) -> Any:
    with serving(instance) as url:
        http = Connections(url, None, None, 30.0)
        # in Python's form, which the client writes as JSON
        given = {name: value.lower() if name == "loud" else value for name, value in request.items()}
        return ask(http, VERBS["probe"], given)


def of_command(instance: Instance) -> Any:
    app, verb = group(), VERBS["probe"]

    def probe(session: Session, request: Any) -> None:
        session.show(verb.handler(instance, request, Call()), "")

    probe.__annotations__["request"] = verb.request
    command(app, example="t", on="none")(probe)
    return typer.main.get_command(app)


def by_command(instance: Instance, request: dict[str, Any]) -> Any:
    named = [f"--{name}={value}" for name, value in request.items() if name != "table"]
    with redirect_stdout(io.StringIO()) as out:
        try:
            of_command(instance)([request["table"], *named, "--json"], standalone_mode=False)
        except typer.TyperException as error:
            raise InvalidInput(error.format_message()) from None
    return json.loads(out.getvalue())


def in_spark(instance: Instance, request: dict[str, Any]) -> Any:
    model, given = VERBS["probe"].request, {name: request[name] for name in request if name != "table"}
    check_known(given, fields_of(model))
    return {"table": request["table"], "options": parsed(model, given)}


@pytest.mark.parametrize("door", [as_job, as_event, over_http, by_client, by_command, in_spark])
def test_an_option_is_found_at_every_door(
    door: Callable[[Instance, dict[str, Any]], Any], served: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "probe", AFTER)
    assert door(served, ASKED) == ANSWERED
    assert door(served, {"table": "t"}) == {"table": "t", "options": {"loud": None}}


@pytest.mark.parametrize("door", [as_job, as_event, over_http, by_command, in_spark])
def test_an_option_that_a_verb_lacks_is_refused_at_every_door(
    door: Callable[[Instance, dict[str, Any]], Any], served: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "probe", BEFORE)
    mark = {} if door in (by_command, in_spark) else {"mark": "m"}
    assert door(served, {"table": "t", **mark}) == {"table": "t", "options": {}}
    with pytest.raises(InvalidInput, match="loud"):
        door(served, ASKED)


def test_the_docstring_of_a_field_is_its_description_in_openapi(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "probe", AFTER)
    with serving(instance) as url:
        described = httpx.get(f"{url}/openapi.json").json()
    body = described["components"]["schemas"]["LoudProbeRequest"]["properties"]
    assert {name: one["description"] for name, one in body.items()} == {
        "mark": "A value that only programs send.",
        "loud": "The loudness of the answer.",
    }
    assert described["paths"]["/v1/tables/{table}/probe"]["post"]["summary"] == "Ask a table how it is"


def test_the_docstring_of_a_field_is_the_help_of_its_option(
    served: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "probe", AFTER)
    context = typer.Context(of_command(served), info_name="probe")
    text = " ".join(of_command(served).get_help(context).split())
    assert "--loud <str> The loudness of the answer." in text
    assert text.startswith("Usage: probe [OPTIONS] {table} Ask a table how it is.")
    assert "mark" not in text


def test_a_request_is_sent_without_default_values() -> None:
    """A service of an older version can then still accept the request."""
    assert json_of(LoudProbeRequest, {"table": "t", "loud": None, "mark": None}) == {"table": "t"}
    assert json_of(LoudProbeRequest, {"table": "t", "loud": "whisper"}) == ASKED
