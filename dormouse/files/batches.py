"""Batches whose requests succeed or fail alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from dormouse.errors import DormouseError
from dormouse.model.file_reference import ReplaceFileReferencesRequest, SplitFileReferenceRequest

R = TypeVar("R")


class AllFailed(Exception):
    """No request of the batch was valid: nothing is to be committed, not even the commit id."""

    def __init__(self, failed: dict[int, DormouseError]) -> None:
        self.failed = failed
        super().__init__()


def without_conflicts(requests: Sequence[R], touched: Callable[[R], Collection[Any]]) -> Iterator[list[int]]:
    """The requests' numbers in runs that touch nothing twice, so that one statement can apply a run.

    Almost always there is one run: only requests that want the same reference or file end it.
    """
    run: list[int] = []
    seen: set[Any] = set()
    for number, request in enumerate(requests):
        touches = touched(request)
        if any(item in seen for item in touches):
            yield run
            run, seen = [], set()
        run.append(number)
        seen.update(touches)
    if run:
        yield run


def touched_by_replacement(request: ReplaceFileReferencesRequest) -> list[Any]:
    """The references that it takes, and the file that it makes."""
    inputs: list[Any] = [(request.partition_id, name) for name in request.input_filenames]
    return inputs if request.new_reference is None else [*inputs, request.new_reference.filename]


def touched_by_split(request: SplitFileReferenceRequest) -> list[Any]:
    """The reference that it takes, and those that it makes."""
    references = (request.old_reference, *request.new_references)
    return [(r.partition_id, r.filename) for r in references]


def first_doubled(items: Sequence[R]) -> R | None:
    seen: set[R] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def outcome(
    requests: Sequence[R], failed: dict[int, DormouseError]
) -> tuple[list[R], list[tuple[R, DormouseError]]]:
    """What succeeded, and what failed with its error."""
    succeeded = [request for number, request in enumerate(requests) if number not in failed]
    return succeeded, [(requests[number], error) for number, error in sorted(failed.items())]
