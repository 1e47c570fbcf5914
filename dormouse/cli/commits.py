"""`dormouse committer`, `commit-status` and `queue`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.failures import FAILED, say, stop_on_signals
from dormouse.cli.verbs import Session, plural, verb

if TYPE_CHECKING:
    from dormouse.state.commits.committer import Committer
    from dormouse.state.commits.outcomes import CommitOutcome, DeadLetter
    from dormouse.state.commits.queue import QueueDepth

PROGRESS_SECONDS = 10.0
DEAD_LETTERS_SHOWN = 20
DEAD_LETTERS_MAX = 100_000


def add_to(app: typer.Typer) -> None:
    verb(app, "committer", example="dormouse committer --concurrency 4")(committer)
    verb(app, "commit-status", example="dormouse commit-status ingest:2026-01-31")(commit_status)
    verb(app, "queue", example="dormouse queue --json")(queue)


def committer(
    session: Session,
    drain: Annotated[
        bool, typer.Option("--drain", "--once", help="Apply what is there, and end when the queue is empty.")
    ] = False,
    concurrency: Annotated[int, typer.Option(help="How many batches are applied at once.")] = 2,
    batch: Annotated[int, typer.Option(help="How many requests a batch has at most.")] = 500,
) -> None:
    """Apply the commit requests of the queue, until Ctrl-C or SIGTERM: then finish what is begun."""
    with session.open() as instance:
        found = instance.committer(concurrency=concurrency, batch_max=batch)
        if drain:
            outcomes = found.drain()
            session.show(
                {"metrics": found.metrics(), "outcomes": outcomes},
                lambda: "\n".join([*_refused(outcomes), str(found.metrics())]),
            )
            return
        with stop_on_signals() as stop, _progress(found):
            say(
                f"the committer runs, with batches of up to {plural(batch, 'request')}, {concurrency} at "
                "once; Ctrl-C ends it"
            )
            metrics = found.run(stop)
    session.show(metrics, lambda: f"ended: {metrics}")


def commit_status(
    session: Session,
    commit_id: Annotated[
        str,
        typer.Argument(
            help="The id that the request was sent with; that of an ingest is ingest:ID.", show_default=False
        ),
    ],
) -> None:
    """What became of a commit: applied, rejected and why, pending, or unknown.

    Exit code 1 when it is rejected or unknown.
    """
    with session.open(read_only=True) as instance:
        found = instance.commit_status(commit_id)
    session.show(found, lambda: found.state if found.error is None else f"{found.state}: {found.error}")
    if found.state in {"rejected", "unknown"}:
        raise typer.Exit(FAILED)


def queue(
    session: Session,
    dead: Annotated[
        int, typer.Option(min=0, max=DEAD_LETTERS_MAX, help="How many dead letters are shown.")
    ] = DEAD_LETTERS_SHOWN,
) -> None:
    """How deep the commit queue is, and which messages could not be handled, and why."""
    with session.open(read_only=True) as instance:
        depths, letters = instance.commits.depths(), instance.commits.dead_letters(dead)
    session.show({"queues": depths, "dead_letters": letters}, lambda: _picture(depths, letters))


def _refused(outcomes: Sequence[CommitOutcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.error is not None:
            yield f"{outcome.commit_id}: {outcome.state}: {outcome.error}"


def _picture(depths: Sequence[QueueDepth], letters: Sequence[DeadLetter]) -> Any:
    from rich.console import Group

    from dormouse.cli.console import count, grid
    from dormouse.state.commits.outcomes import TEXT_CHARACTERS_MAX

    rows = [
        (number, count(depth.messages, exact=not depth.approximate), f"{depth.oldest_seconds:.0f} s")
        for number, depth in enumerate(depths)
    ]
    parts: list[Any] = [grid(("queue", "messages", "oldest"), rows)]
    if letters:
        shown = [(f"{one.buried_at:%Y-%m-%d %H:%M:%S}", one.reason, one.body) for one in letters]
        # the reason says what to do at its end: it is wrapped, not cut
        parts.append(
            grid(("dead since", "reason", "message"), shown, cell_characters_max=TEXT_CHARACTERS_MAX)
        )
    return Group(*parts, *(() if letters else ("no dead letters",)))


@contextmanager
def _progress(committer: Committer) -> Iterator[None]:
    """A line on stderr now and then, when there is news."""
    from dormouse.postgres.lease import Pulse

    said = committer.metrics().batches

    def tell() -> None:
        nonlocal said
        if (now := committer.metrics()).batches != said:
            said = now.batches
            say(f"so far {now}")

    with Pulse(tell, PROGRESS_SECONDS, "committer-progress"):
        yield
