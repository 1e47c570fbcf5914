"""The list of all verbs, and the verbs that run as jobs: their kinds, requests, checks and functions.
The query service and `Instance.jobs.start` start jobs; `dormouse serve` and `dormouse jobs worker` run them.
A query that runs as a job writes its answer as an object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from dormouse.api.instance import Instance
from dormouse.errors import DormouseError, InvalidInput, JobError, ObjectAlreadyExists
from dormouse.jobs.job import ANSWERING, answer_names
from dormouse.jobs.runs import JobFunction, Progress
from dormouse.model.json_values import json_value
from dormouse.reading.streams import Interruption
from dormouse.verbs import editing, loading, reading, rounds, rows, tables
from dormouse.verbs.verb import Call, Job, Request, Verb, parse, required

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.reading.sql.engine import Sessions

VERBS: dict[str, Verb] = {
    verb.name: verb for theme in (reading, loading, editing, rounds, rows, tables) for verb in theme.VERBS
}
"""All verbs by name. Code reads this dict when it runs, and not when its module is imported."""


def kinds() -> dict[str, list[Verb]]:
    """Returns the verbs of each kind of job, by kind."""
    found: dict[str, list[Verb]] = {}
    for verb in VERBS.values():
        if verb.job is not None:
            found.setdefault(verb.job.kind, []).append(verb)
    return found


def parsed(kind: str, request: object) -> tuple[Verb, Request]:
    """Returns the verb and the parsed request of a job. Raises `InvalidInput` for an invalid request."""
    verbs = kinds().get(kind)
    if verbs is None:
        raise InvalidInput(f"kind {kind!r} is none of {', '.join(kinds())}")
    what = f"the request of a job of kind {kind!r}"
    if len(verbs) > 1 and isinstance(request, dict):
        request = {name: value for name, value in request.items() if value is not None}
        verbs = [verb for verb in verbs if any(name in request for name in required(verb.request))] or verbs
        if len(verbs) != 1:
            wanted = " or ".join(", ".join(required(verb.request)) for verb in kinds()[kind])
            raise InvalidInput(f"{what} is not valid: give {wanted}")
    return verbs[0], parse(verbs[0].request, request, what)


def check_request(instance: Instance, kind: str, request: object, sessions: Sessions | None = None) -> None:
    """Raises `InvalidInput` or `TableNotFound` for a request that would fail as soon as a worker takes it.

    One of the processes of `sessions` parses a statement. If `sessions` is None, this process does.
    """
    verb, asked = parsed(kind, request)
    _job(verb).check(instance, asked, Call(sessions=sessions))


def functions(instance: Instance, sessions: Sessions | None = None) -> dict[str, JobFunction]:
    """Returns the function that workers run for each kind, by kind.

    Statements run in the processes of `sessions`, or in this process if it is None.
    """
    return {kind: _function(instance, kind, sessions) for kind in kinds()}


def _job(verb: Verb) -> Job:
    return cast(Job, verb.job)


def _function(instance: Instance, kind: str, sessions: Sessions | None) -> JobFunction:
    def run(request: Any, progress: Progress) -> Any:
        verb, asked = parsed(kind, request)
        interruption = Interruption()
        progress.at_end(interruption.set)
        call = Call(interruption, sessions, progress, progress)
        work = _job(verb).work or verb.handler
        try:
            progress.check()
            if kind in ANSWERING:
                return _as_object(instance, lambda: work(instance, asked, call), progress)
            return json_value(work(instance, asked, call))
        except JobError:
            raise
        except DormouseError:
            progress.check()  # raises if the job was cancelled or lost: then no other error counts
            raise

    return run


def _as_object(
    instance: Instance, rows: Callable[[], pa.RecordBatchReader], progress: Progress
) -> dict[str, Any]:
    """Writes an answer's rows as an object.

    Returns the object's name as `object`, its `url` in S3, and its numbers of `rows` and `bytes`.
    """
    for name in answer_names(progress.job_id, progress.attempt, progress.attempt):
        with suppress(ObjectAlreadyExists):
            return _exported(instance, rows, progress, name)
    raise ObjectAlreadyExists(f"attempt {progress.attempt} has written its answer already")


def _exported(
    instance: Instance, rows: Callable[[], pa.RecordBatchReader], progress: Progress, name: str
) -> dict[str, Any]:
    from dormouse.sources.export import export

    objects = instance.objects
    try:
        with objects.staged(name) as path, path.open("wb") as sink, rows() as reader:
            count = export(reader, sink, "parquet", progress)
    except Exception:
        progress.check()  # an interrupted reader has no other error worth reporting
        raise
    url = objects.uri(name) if objects.url.startswith("s3:") else None  # a path on this machine is no URL
    return {"object": name, "url": url, "rows": count, "bytes": objects.size(name)}
