"""The HTTP paths of jobs, and the worker that runs jobs within the service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from dormouse.api.instance import Instance
from dormouse.errors import InvalidInput
from dormouse.jobs.job import ANSWERING, SENT, JobPlace
from dormouse.jobs.worker import Worker
from dormouse.objects.names import hiding, without_paths
from dormouse.reading.sql.engine import Sessions
from dormouse.service import documents
from dormouse.service.declared import JsonRoute
from dormouse.service.documents import ANSWERS, RESULTS, STARTS, Body
from dormouse.service.formats import Part, entity_tag, wanted_part
from dormouse.service.problems import problems
from dormouse.service.routes import By, IdempotencyKey, chosen_id, job_answer, job_document
from dormouse.service.running import Answer
from dormouse.service.security import SEGMENT, Place, Right, check_may, served
from dormouse.service.work import FileWork, Opened
from dormouse.verbs.jobs import check_request, functions, kinds
from dormouse.verbs.rows import start_query
from dormouse.verbs.verb import Verb

PARQUET = "application/vnd.apache.parquet"
CHUNK_BYTES = 1 << 20
WITH_ROWS = "row_query"
"""The kind of jobs whose results contain rows of users. In results of other kinds, local paths are hidden."""
AGAIN_SECONDS = 10.0
"""The pause before a new worker replaces one that failed."""

logger = logging.getLogger("dormouse.service")


def _instance(request: Request) -> Instance:
    return cast(Instance, request.app.state.service.instance)


def _sessions(request: Request) -> Sessions | None:
    return cast(Sessions | None, request.app.state.service.sessions)


Parsing = Annotated[Sessions | None, Depends(_sessions)]
Here = Annotated[Instance, Depends(_instance)]
JobId = Annotated[str, Path(description="the id of a job"), SEGMENT]
jobs = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=JsonRoute)


def _asked_with(verbs: Iterable[Verb]) -> str:
    return ", or ".join(", ".join(verb.request.model_fields) for verb in verbs)


_KINDS = {kind: _asked_with(verbs) for kind, verbs in kinds().items() if kind not in SENT}
_KINDS_TEXT = f"one of {', '.join(_KINDS)}; CSV is sent to /v1/rows/{{table}}/csv"
_REQUESTS_TEXT = "; ".join(f"of {kind} {fields}" for kind, fields in _KINDS.items())


class JobRequest(Body):
    """A job to start: its kind, and the request of that kind."""

    kind: str = Field(description=_KINDS_TEXT, examples=["query", "ingest", "compact", "row_change"])
    request: dict[str, Any] = Field(
        description=_REQUESTS_TEXT,
        examples=[{"statement": "select carrier, count(*) from flights group by carrier"}],
    )
    job_id: str | None = Field(
        default=None,
        description="an id chosen by the client. The same request with the same id is the same job; another "
        "request with it is refused. A new id if left out. The header Idempotency-Key has the same effect",
    )


@jobs.post(
    "", status_code=202, response_model=documents.JobDocument, responses=STARTS, summary="Start long work"
)
@served(Right.STARTS, Place.LOOKUPS)
def start(here: Here, parsing: Parsing, holder: By, body: JobRequest, key: IdempotencyKey = None) -> Response:
    """Starts a job, such as a query whose answer becomes an object, an ingest, or a round of compaction."""
    started = [kind for kind in kinds() if kind not in SENT]
    if body.kind not in started:
        known = ", ".join(started)
        raise InvalidInput(f"kind {body.kind[:80]!r} is none of {known}")
    chosen = chosen_id(body.job_id, key)
    check_may(holder, body.kind)
    check_request(here, body.kind, body.request, parsing)
    if body.kind == "row_query" and chosen is None:
        job_id = start_query(here, body.request, holder.owner)
    else:
        job_id = here.jobs.start(body.kind, body.request, holder.owner, job_id=chosen)
    return job_answer(here, here.jobs.status(job_id, holder.owner), 202)


@jobs.get("", response_model=documents.JobList, responses=ANSWERS, summary="Jobs")
@served(Right.HOLDER, Place.LOOKUPS)
def list_jobs(
    here: Here,
    holder: By,
    kind: Annotated[str | None, Query(description="only jobs of this kind")] = None,
    state: Annotated[str | None, Query(description="only jobs in this state")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="the largest number of jobs")] = 100,
    after: Annotated[str | None, Query(description="the `next` of the page before")] = None,
) -> Response:
    """Lists the jobs of the token's holder.

    With the service's own token, it lists all jobs, including rounds of tables, such as compactions.
    """
    place = None if after is None else JobPlace.parse(after)
    page = partial(here.jobs.list, kind, state, owner=holder.owner)  # type: ignore[arg-type]
    found = page(limit=limit, after=place)
    last = JobPlace.of(found[-1]) if len(found) == limit else None
    following = last.text if last and page(limit=1, after=last) else None
    shown = [job_document(job, hiding(here.objects.url)) for job in found]
    return JSONResponse({"jobs": shown, "next": following})


@jobs.get("/{job_id}", response_model=documents.JobDocument, responses=ANSWERS, summary="One job")
@served(Right.HOLDER, Place.LOOKUPS)
def status(here: Here, holder: By, job_id: JobId) -> Response:
    """Returns the state of a job."""
    return job_answer(here, here.jobs.status(job_id, holder.owner))


@jobs.delete("/{job_id}", response_model=documents.JobDocument, responses=ANSWERS, summary="Cancel a job")
@served(Right.HOLDER, Place.LOOKUPS)
def cancel(here: Here, holder: By, job_id: JobId) -> Response:
    """Cancels a job. A waiting job ends at once, a running one soon. Does nothing if it has ended."""
    return job_answer(here, here.jobs.cancel(job_id, holder.owner))


@jobs.get(
    "/{job_id}/result", response_model=documents.JobResult, responses=RESULTS, summary="The result of a job"
)
@served(Right.HOLDER, Place.LOOKUPS)
def result(here: Here, holder: By, job_id: JobId) -> Response:
    """Returns the result of a complete job."""
    found = here.jobs.result(job_id, holder.owner)
    if here.jobs.status(job_id, holder.owner).kind in kinds().keys() - {WITH_ROWS}:
        found = without_paths(found, hiding(here.objects.url))
    return JSONResponse({"result": found})


@jobs.get(
    "/{job_id}/answer",
    response_class=Response,
    responses={
        200: {
            "description": "The rows.",
            "content": {PARQUET: {"schema": {"type": "string", "format": "binary"}}},
        },
        **documents.PARTS,
        **RESULTS,
        **problems(416),
    },
    summary="The rows of a query, as Parquet",
)
@served(Right.HOLDER, Place.FILES)
async def answer(here: Here, holder: By, request: Request, job_id: JobId) -> Response:
    """Returns the object that the job's result names, or one range of its bytes. The object never changes."""

    def open_rows() -> Opened:
        if (job := here.jobs.status(job_id, holder.owner)).kind not in ANSWERING:
            raise InvalidInput(f"job {job_id!r} is of kind {job.kind!r}, and has no rows: ask for its result")
        name = here.jobs.result(job_id, holder.owner)["object"]
        part = wanted_part(request.headers, entity_tag(name), here.objects.size(name))
        return Opened(_chunks(here, name, part), part.headers, part.status)

    return Answer(Place.FILES, None, FileWork(open_rows, PARQUET))


def _chunks(instance: Instance, name: str, part: Part) -> Generator[bytes]:
    for start in range(part.start, part.end, CHUNK_BYTES):
        yield instance.objects.get_range(name, start, min(CHUNK_BYTES, part.end - start))


class JobWorker:
    """The job worker of a service, in its own thread. If an error ends the worker, a new one replaces it."""

    def __init__(self, instance: Instance, sessions: Sessions | None, threads: int) -> None:
        self._made = partial(instance.jobs.worker, functions(instance, sessions), threads)
        self._worker: Worker = self._made()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dormouse-serve-jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds_max: float) -> None:
        """Stops the worker. Running jobs have `seconds_max` to finish; other workers take over the rest."""
        self._is_closed.set()
        self._worker.stop()
        self._thread.join(seconds_max)
        if self._thread.is_alive():
            self._worker.stop()
            self._thread.join(seconds_max)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._worker.run()
            except Exception:
                logger.exception("the job worker failed and is replaced")
            else:
                return
            while not self._is_closed.wait(AGAIN_SECONDS):
                try:
                    self._worker = self._made()
                    break
                except Exception:
                    logger.exception("cannot start a job worker yet; trying again")
