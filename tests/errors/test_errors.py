"""Errors, which name their subject and survive a pickle on the way from another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import dormouse as dm
from dormouse import errors
from dormouse.aws.aws import AwsRefused
from dormouse.errors import BatchFailed, DormouseError, FileReferenceError, FileReferenceNotFound
from dormouse.model.table import Problem
from dormouse.postgres.session import Unavailable
from dormouse.reading.checked_files import FileGone
from dormouse.service.problems import problem_of
from dormouse.sources.text_values import UnfitText
from dormouse.state.commits.outcomes import PartlyApplied
from dormouse.state.files.operations import RefusedPart

ALL = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, DormouseError)]


@pytest.mark.parametrize("kind", [k for k in ALL if issubclass(k, FileReferenceError)])
def test_errors_of_references_name_table_file_partition_and_job(kind: Any) -> None:
    error = kind("t", "f", "p", "j")
    assert all(
        f"{name} '{value}'" in str(error)
        for name, value in zip(("table", "file", "partition", "job"), "tfpj", strict=True)
    )
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), again.table, again.filename, again.partition_id, again.job_id) == (kind, *"tfpj")
    assert "None" not in str(kind("t", "f"))


@pytest.mark.parametrize("kind", [k for k in ALL if issubclass(k, BatchFailed)])
def test_errors_of_batches_have_the_succeeded_and_the_failed_requests(kind: Any) -> None:
    cause = FileReferenceNotFound("t", "f")
    error = pickle.loads(pickle.dumps(kind(["good"], [("bad", cause), ("worse", cause)])))  # noqa: S301
    assert (type(error), error.succeeded, [request for request, _ in error.failed]) == (
        kind,
        ("good",),
        ["bad", "worse"],
    )
    assert str(error).startswith("2 of 3 requests failed; the first: ")
    assert [type(e) for e in error.errors] == [FileReferenceNotFound] * 2


def examples() -> Iterator[DormouseError]:
    """Yields an error of each public class, and some of internal classes."""
    cause = FileReferenceNotFound("t", "f")
    arguments: dict[Any, tuple[Any, ...]] = {
        FileReferenceError.__init__: ("t", "f", "p", "j"),
        BatchFailed.__init__: (["good"], [("bad", cause)]),
        errors.RowConflict.__init__: ("t", [(7, 1, 2)]),
        errors.CheckFailed.__init__: ([Problem("totals", "t", "p", "f", "is lost")], "no file is deleted"),
        errors.ObjectDamaged.__init__: ("t", "p", "f", "is cut off"),
        errors.PayloadsDiffer.__init__: ("they differ", (("tenant", "id"),)),
        errors.CutExpired.__init__: ("too old", datetime(2026, 11, 28, tzinfo=UTC)),
    }
    for kind in ALL:
        yield kind(*arguments.get(kind.__init__, ("it failed",)))
    yield PartlyApplied(RefusedPart(2, ((1, cause),), ("a mark",)))
    yield FileGone("f", "t")
    yield Unavailable("no server", "host=nowhere", crowded=True)
    yield AwsRefused("AccessDenied", "no right")
    yield UnfitText(dm.Field("k", dm.LONG), "x", 1)


@pytest.mark.parametrize("error", list(examples()), ids=lambda error: type(error).__name__)
def test_errors_of_all_classes_survive_a_pickle(error: DormouseError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again)) == (type(error), str(error))
    assert (again.args, again.data, repr(vars(again))) == (error.args, error.data, repr(vars(error)))


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_documented(kind: type) -> None:
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_an_error_of_another_process_is_rebuilt_from_its_message(kind: Any) -> None:
    error = kind.from_message("the table is away")
    assert (type(error), str(error)) == (kind, "the table is away")


def test_an_unavailable_payload_has_retry_after_over_http() -> None:
    found = problem_of(errors.PayloadUnavailable("please reduce your request rate"))
    assert (found.status, found.headers) == (503, {"Retry-After": "1"})


def test_a_failed_commit_is_not_an_unknown_outcome() -> None:
    assert not issubclass(errors.CommitOutcomeUnknown, errors.CommitFailed)
    assert not issubclass(errors.CommitFailed, errors.CommitOutcomeUnknown)
    assert issubclass(errors.AttemptAbandoned, errors.CommitFailed)
