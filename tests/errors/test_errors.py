"""Errors say what they are about, and survive a pickle on their way from another process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dormouse import errors
from dormouse.errors import BatchFailed, DormouseError, FileReferenceError, FileReferenceNotFound
from dormouse.service.problems import problem_of

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
def test_batches_carry_what_succeeded_and_what_failed(kind: Any) -> None:
    cause = FileReferenceNotFound("t", "f")
    error = pickle.loads(pickle.dumps(kind(["good"], [("bad", cause), ("worse", cause)])))  # noqa: S301
    assert (type(error), error.succeeded, [request for request, _ in error.failed]) == (
        kind,
        ("good",),
        ["bad", "worse"],
    )
    assert str(error).startswith("2 of 3 requests failed; the first: ")
    assert [type(e) for e in error.errors] == [FileReferenceNotFound] * 2


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_documented(kind: type) -> None:
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_what_another_process_met_is_told_by_its_message(kind: Any) -> None:
    error = kind.told("the table is away")
    assert (type(error), str(error)) == (kind, "the table is away")


def test_a_payload_that_cannot_be_read_now_is_asked_for_again_over_http() -> None:
    found = problem_of(errors.PayloadUnavailable("please reduce your request rate"))
    assert (found.status, found.headers) == (503, {"Retry-After": "1"})


def test_a_failed_commit_is_not_an_unknown_outcome() -> None:
    assert not issubclass(errors.CommitOutcomeUnknown, errors.CommitFailed)
    assert not issubclass(errors.CommitFailed, errors.CommitOutcomeUnknown)
    assert issubclass(errors.AttemptAbandoned, errors.CommitFailed)
