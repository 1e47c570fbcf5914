"""`dormouse jobs`: what was asked of the lake, and what it has been doing."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, command, group, plural
from dormouse.cli.failures import FAILED, say, stop_on_signals
from dormouse.cli.options import bounds, declare
from dormouse.errors import DormouseError, InvalidInput

if TYPE_CHECKING:
    from dormouse.jobs.job import Job
    from dormouse.jobs.runs import JobFunction
    from dormouse.jobs.worker import Worker

app = group()
jobs = group("jobs", "Jobs and rounds: what runs, what waits, what has ended.")
app.add_typer(jobs)
JobId = Annotated[str, "The job's id."]


@command(jobs, "list", example="dormouse jobs list --kind round:compaction")
def list_(
    session: Session,
    kind: Annotated[str | None, "Only of this kind; of rounds round:ingest, round:compaction, …"] = None,
    state: Annotated[str | None, "Only PROCESSING, COMPLETE, FAILED or CANCELLED ones."] = None,
    owner: Annotated[str | None, "Only this owner's."] = None,
    limit: Annotated[int, "How many at most.", bounds(1, 10_000)] = 30,
) -> None:
    """Jobs and rounds: those that have not ended, newest first, then those that ended last."""
    with session.open(read_only=True) as instance:
        listed = instance.jobs.list(kind, state, owner=owner, limit=limit)  # type: ignore[arg-type]
        kinds = instance.jobs.kinds()
    columns = ("job", "kind", "about", "state", "started", "seconds", "by", "what")
    session.table({"jobs": listed, "kinds": kinds}, columns, map(_row, listed), empty="there are no jobs")


def _listing() -> None:
    """Without a command `dormouse jobs` lists, with the options of `list`."""
    [listing] = [each.callback for each in jobs.registered_commands]
    assert listing is not None  # noqa: S101  # it stands above
    options = list(inspect.signature(listing).parameters.values())

    def run(context: typer.Context, **given: Any) -> None:
        name = context.invoked_subcommand
        if name is None:
            listing(**given)
        elif any(given[option.name] != option.default for option in options):
            raise InvalidInput(f"options go after the command: dormouse jobs {name} --…")

    of_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    declare(run, [of_context, *options])
    jobs.callback(
        invoke_without_command=True,
        no_args_is_help=False,
        help=jobs.info.help,
        epilog="Example: dormouse jobs",
    )(run)


_listing()


@command(jobs, "show", example="dormouse jobs show 0198c0de-0000-7000-8000-000000000000")
def show(
    session: Session,
    job_id: JobId,
    /,
    result: Annotated[bool, "Also what it was asked and what it gave."] = False,
) -> None:
    """One job: its state, and how it came to it. Exit code 1 when it has failed."""
    with session.open(read_only=True) as instance:
        job = instance.jobs.status(job_id)
        more: dict[str, Any] = {}
        if result:
            more["request"] = instance.jobs.request(job_id)
            more["result"] = instance.jobs.result(job_id) if job.state == "COMPLETE" else None
    session.lines({"job": job, **more}, _lines(job, more))
    if job.state == "FAILED":
        raise typer.Exit(FAILED)


@command(jobs, "cancel", example="dormouse jobs cancel 0198c0de-0000-7000-8000-000000000000")
def cancel(session: Session, job_id: JobId, /) -> None:
    """End a job that waits; ask one that runs to end, which it does when it next tells how far it is."""
    with session.open() as instance:
        job = instance.jobs.cancel(job_id)
    session.show(job, f"job {job_id} is {job.state if job.has_ended else 'asked to end'}")


@command(jobs, "limit", example="dormouse jobs limit report 3")
def limit(
    session: Session,
    kind: Annotated[str, "The kind of job."],
    running_max: Annotated[int, "How many run at once; 0: any number.", bounds(0)],
    /,
) -> None:
    """How many jobs of a kind run at once, whatever workers there are."""
    with session.open() as instance:
        instance.jobs.limit(kind, running_max or None)
    said = f"at most {running_max:,} jobs" if running_max else "any number of jobs"
    session.show({"kind": kind, "running_max": running_max or None}, f"{said} of kind {kind} run at once")


@command(jobs, "worker", example="dormouse jobs worker --function report=reports:make --threads 2")
def worker(
    session: Session,
    function: Annotated[
        list[str] | None, "A kind and what runs it: KIND=module:function(request, progress). Repeatable."
    ] = None,
    threads: Annotated[int, "How many jobs of each kind run at once.", bounds(1, 1_000)] = 4,
    drain: Annotated[bool, "End when no job is left that may run."] = False,
    idle_seconds: Annotated[
        float, "After so long without work it lets its connection go, and asks now and then."
    ] = 300.0,
) -> None:
    """Run jobs until Ctrl-C or SIGTERM: then finish what runs; a second one has others run it.

    It runs queries, ingests, compactions and splits that were started as jobs, and the functions given.
    """
    from dormouse.verbs.jobs import functions

    own = dict(_function(text) for text in function or ())
    with session.open() as instance:
        worker = instance.jobs.worker(functions(instance) | own, threads, idle_seconds=idle_seconds)
        with stop_on_signals() as stop, _stopped_by(stop, worker):
            if not drain:
                say(f"the worker runs, with {plural(threads, 'thread')} of each kind; Ctrl-C ends it")
            report = worker.run(drain=drain)
    ended = f"{report.complete:,} complete, {report.failed:,} failed, {report.cancelled:,} cancelled"
    session.show(report, ended)


@contextmanager
def _stopped_by(stop: threading.Event, worker: Worker) -> Iterator[None]:
    def wait() -> None:
        stop.wait()
        worker.stop()

    threading.Thread(target=wait, name="stop-worker", daemon=True).start()
    yield


def _function(text: str) -> tuple[str, JobFunction]:
    kind, equals, where = text.partition("=")
    module, colon, name = where.partition(":")
    if not (equals and colon and kind and module and name):
        raise InvalidInput(f"--function {text!r}: write KIND=module:function, like report=reports:make")
    try:
        function: JobFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DormouseError(f"--function {text!r}: {error}; is its folder in PYTHONPATH?") from None
    return kind, function


def _row(job: Job) -> tuple[str, ...]:
    started = f"{job.started_at:%Y-%m-%d %H:%M:%S}"
    seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
    about = job.about or job.owner or ""
    return job.job_id, job.kind, about, _state(job), started, seconds, job.worker or "", _what(job)


def _state(job: Job) -> str:
    if job.has_ended:
        return job.state
    if job.is_waiting:
        return "waits" if job.has_workers else "waits: no worker has its kind"
    return "ends" if job.is_cancelled else "runs"


def _what(job: Job) -> str:
    if job.error is not None:
        return job.error
    of = "" if job.total is None else f" of {job.total:,}"
    return job.message or ("" if job.current is None else f"{job.current:,}{of}")


def _lines(job: Job, more: dict[str, Any]) -> Sequence[str]:
    fields = {
        "job": job.job_id,
        "kind": job.kind,
        "state": _state(job),
        "owner": job.owner,
        "about": job.about,
        "started": job.started_at,
        "taken": job.claimed_at,
        "ended": job.ended_at,
        "by": job.worker,
        "attempts": job.attempts or None,
        "progress": _what(job) if job.error is None else None,
        "error": job.error,
        **more,
    }
    lines = [f"{name}: {_shown(value)}" for name, value in fields.items() if value not in (None, "")]
    return [*lines, *([] if job.traceback is None else ["", job.traceback.rstrip()])]


def _shown(value: Any) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if isinstance(value, datetime) else str(value)
