"""`dormouse jobs`, `commit-status` and `queue`: jobs, commit requests and their results."""

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
from dormouse.cli.console import count, grid
from dormouse.cli.failures import FAILED, say, stop_on_signals
from dormouse.cli.options import bounds, declare
from dormouse.errors import DormouseError, InvalidInput

if TYPE_CHECKING:
    from dormouse.jobs.job import Job
    from dormouse.jobs.runs import JobFunction
    from dormouse.jobs.worker import Worker
    from dormouse.state.commits.outcomes import DeadLetter
    from dormouse.state.commits.queue import QueueDepth

app = group()
jobs = group("jobs", "Show, cancel, limit and run jobs; list rounds.")
app.add_typer(jobs)
JobId = Annotated[str, "The job's id."]


@command(jobs, example="--kind round:compaction")
def list_(
    session: Session,
    kind: Annotated[str | None, "Only this kind; rounds are round:ingest, round:compaction, …"] = None,
    state: Annotated[str | None, "Only PROCESSING, COMPLETE, FAILED or CANCELLED ones."] = None,
    owner: Annotated[str | None, "Only this owner's."] = None,
    limit: Annotated[int, "The most jobs to list.", bounds(1, 10_000)] = 30,
) -> None:
    """List jobs and rounds: the unfinished ones, the newest first, and then the last that ended."""
    with session.open(read_only=True) as instance:
        listed = instance.jobs.list(kind, state, owner=owner, limit=limit)  # type: ignore[arg-type]
        kinds = instance.jobs.kinds()
    columns = ("job", "kind", "about", "state", "started", "seconds", "by", "what")
    session.table({"jobs": listed, "kinds": kinds}, columns, map(_row, listed), empty="there are no jobs")


def _listing() -> None:
    """Adds the options of `dormouse jobs list` to `dormouse jobs`, which lists jobs without a command."""
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


@command(jobs, example="0198c0de-0000-7000-8000-000000000000")
def show(
    session: Session,
    job_id: JobId,
    /,
    result: Annotated[bool, "Also show its request and its result."] = False,
) -> None:
    """Show one job: its state and how it got there. Exit code 1 when it has failed."""
    with session.open(read_only=True) as instance:
        job = instance.jobs.status(job_id)
        more: dict[str, Any] = {}
        if result:
            more["request"] = instance.jobs.request(job_id)
            more["result"] = instance.jobs.result(job_id) if job.state == "COMPLETE" else None
    session.lines({"job": job, **more}, _lines(job, more))
    if job.state == "FAILED":
        raise typer.Exit(FAILED)


@command(jobs, example="0198c0de-0000-7000-8000-000000000000")
def cancel(session: Session, job_id: JobId, /) -> None:
    """Cancel a job. A running job ends when it next reports its progress."""
    with session.open() as instance:
        job = instance.jobs.cancel(job_id)
    session.show(job, f"job {job_id} is {job.state if job.has_ended else 'asked to end'}")


@command(jobs, example="report 3")
def limit(
    session: Session,
    kind: Annotated[str, "The kind of job."],
    running_max: Annotated[int, "The most that run at once; 0: any number.", bounds(0)],
    /,
) -> None:
    """Limit how many jobs of a kind run at once, across all workers."""
    with session.open() as instance:
        instance.jobs.limit(kind, running_max or None)
    said = f"at most {running_max:,} jobs" if running_max else "any number of jobs"
    session.show({"kind": kind, "running_max": running_max or None}, f"{said} of kind {kind} run at once")


@command(jobs, example="--function report=reports:make --threads 2")
def worker(
    session: Session,
    function: Annotated[
        list[str] | None, "A kind and its function(request, progress), as KIND=module:function. Repeatable."
    ] = None,
    threads: Annotated[int, "The most jobs of each kind that run at once.", bounds(1, 1_000)] = 4,
    drain: Annotated[bool, "End when no job can run."] = False,
    idle_seconds: Annotated[
        float,
        "Seconds without work after which the worker closes its connection and only polls at intervals.",
    ] = 300.0,
) -> None:
    """Run jobs until Ctrl-C or SIGTERM, then finish running ones. A second signal leaves them to others.

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
        return "waits" if job.has_workers else "waits: no worker runs this kind"
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
    lines = [f"{name}: {_short_text(value)}" for name, value in fields.items() if value not in (None, "")]
    return [*lines, *([] if job.traceback is None else ["", job.traceback.rstrip()])]


def _short_text(value: Any) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if isinstance(value, datetime) else str(value)


DEAD_LETTERS_SHOWN = 20
DEAD_LETTERS_MAX = 100_000


@command(app, example="ingest:2026-01-31")
def commit_status(
    session: Session,
    commit_id: Annotated[str, "The id of the commit request; for an ingest it is ingest:ID."],
    /,
) -> None:
    """Show the state of a commit: applied, rejected with the reason, pending or unknown.

    Exit code 1 when it is rejected or unknown.
    """
    with session.open(read_only=True) as instance:
        outcome = instance.commit_status(commit_id)
    session.show(outcome, outcome.state if outcome.error is None else f"{outcome.state}: {outcome.error}")
    if outcome.state in {"rejected", "unknown"}:
        raise typer.Exit(FAILED)


@command(app, example="--json")
def queue(
    session: Session,
    dead: Annotated[int, "The most dead letters to show.", bounds(0, DEAD_LETTERS_MAX)] = DEAD_LETTERS_SHOWN,
) -> None:
    """Show the depth of the commit queue, and its dead letters with their reasons."""
    with session.open(read_only=True) as instance:
        depths, letters = instance.commits.depths(), instance.commits.dead_letters(dead)
    session.show({"queues": depths, "dead_letters": letters}, lambda: _picture(depths, letters))


def _picture(depths: Sequence[QueueDepth], letters: Sequence[DeadLetter]) -> Any:
    from rich.console import Group

    from dormouse.state.commits.outcomes import TEXT_CHARACTERS_MAX

    rows = [
        (number, count(depth.messages, exact=not depth.approximate), f"{depth.oldest_seconds:.0f} s")
        for number, depth in enumerate(depths)
    ]
    shown = [(f"{one.buried_at:%Y-%m-%d %H:%M:%S}", one.reason, one.body) for one in letters]
    # a reason ends with its remedy, so it is wrapped and not cut off
    dead = grid(("dead since", "reason", "message"), shown, cell_characters_max=TEXT_CHARACTERS_MAX)
    return Group(grid(("queue", "messages", "oldest"), rows), dead if letters else "no dead letters")
