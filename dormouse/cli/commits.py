"""`dormouse committer`, `commit-status` and `queue`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, command, group, plural
from dormouse.cli.console import count, grid
from dormouse.cli.failures import FAILED, say, stop_on_signals
from dormouse.cli.options import bounds

if TYPE_CHECKING:
    from dormouse.state.commits.committer import Committer
    from dormouse.state.commits.outcomes import DeadLetter
    from dormouse.state.commits.queue import QueueDepth

app = group()
PROGRESS_SECONDS = 10.0
DEAD_LETTERS_SHOWN = 20
DEAD_LETTERS_MAX = 100_000


@command(app, "committer", example="dormouse committer --concurrency 4")
def committer(
    session: Session,
    drain: Annotated[
        bool, typer.Option("--drain", "--once", help="Apply what is there, and end when the queue is empty.")
    ] = False,
    concurrency: Annotated[int, "How many batches are applied at once."] = 2,
    batch: Annotated[int, "How many requests a batch has at most."] = 500,
) -> None:
    """Apply the commit requests of the queue, until Ctrl-C or SIGTERM: then finish what is begun."""
    with session.open() as instance:
        committer = instance.committer(concurrency=concurrency, batch_max=batch)
        if drain:
            outcomes = committer.drain()
            refused = [
                f"{one.commit_id}: {one.state}: {one.error}" for one in outcomes if one.error is not None
            ]
            metrics = committer.metrics()
            session.lines({"metrics": metrics, "outcomes": outcomes}, [*refused, str(metrics)])
            return
        with stop_on_signals() as stop, _progress(committer):
            requests = plural(batch, "request")
            say(
                f"the committer runs, with batches of up to {requests}, {concurrency} at once; Ctrl-C ends it"
            )
            metrics = committer.run(stop)
    session.show(metrics, f"ended: {metrics}")


@command(app, "commit-status", example="dormouse commit-status ingest:2026-01-31")
def commit_status(
    session: Session,
    commit_id: Annotated[str, "The id that the request was sent with; that of an ingest is ingest:ID."],
    /,
) -> None:
    """What became of a commit: applied, rejected and why, pending, or unknown.

    Exit code 1 when it is rejected or unknown.
    """
    with session.open(read_only=True) as instance:
        outcome = instance.commit_status(commit_id)
    session.show(outcome, outcome.state if outcome.error is None else f"{outcome.state}: {outcome.error}")
    if outcome.state in {"rejected", "unknown"}:
        raise typer.Exit(FAILED)


@command(app, "queue", example="dormouse queue --json")
def queue(
    session: Session,
    dead: Annotated[
        int, "How many dead letters are shown.", bounds(0, DEAD_LETTERS_MAX)
    ] = DEAD_LETTERS_SHOWN,
) -> None:
    """How deep the commit queue is, and which messages could not be handled, and why."""
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
    # the reason says what to do at its end: it is wrapped, not cut
    dead = grid(("dead since", "reason", "message"), shown, cell_characters_max=TEXT_CHARACTERS_MAX)
    return Group(grid(("queue", "messages", "oldest"), rows), dead if letters else "no dead letters")


@contextmanager
def _progress(committer: Committer) -> Iterator[None]:
    """Says on stderr now and then how far the committer is, when there is news."""
    from dormouse.postgres.lease import Pulse

    batches = committer.metrics().batches

    def tell() -> None:
        nonlocal batches
        if (now := committer.metrics()).batches != batches:
            batches = now.batches
            say(f"so far {now}")

    with Pulse(tell, PROGRESS_SECONDS, "committer-progress"):
        yield
