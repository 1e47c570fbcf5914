"""The values of the file reference store. The conformance suite tests the invalid ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidInput
from dormouse.model.file_reference import (
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
    group_by_file,
)
from dormouse.model.text import check_text, check_texts
from dormouse.model.types import is_text
from tests.stored import file, ref


@given(st.integers(0, 2**63 - 1))
def test_the_halves_of_a_split_add_up_and_differ_by_one_at_most(rows: int) -> None:
    old = ref("a", rows=rows, job_id="j", last_updated=datetime.now(UTC))
    left, right = SplitFileReferenceRequest.split_to_children(old, "L", "R").new_references
    assert left.row_count + right.row_count == rows
    assert abs(left.row_count - right.row_count) <= 1
    for half in (left, right):
        assert (half.job_id, half.last_updated, half.count_approximate) == (None, None, True)
        assert half.only_contains_data_for_this_partition is False


def test_references_are_grouped_by_file_in_the_order_in_which_they_come() -> None:
    references = [ref("b"), ref("a"), ref("b", "L")]
    assert group_by_file(references) == [file("b", references[0], references[2]), file("a", references[1])]
    assert group_by_file([]) == []


def test_a_file_accepts_only_references_to_itself() -> None:
    with pytest.raises(InvalidInput, match="'a' has a reference to 'b'"):
        file("a", ref("b"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: file("a", min_key="k"), "'a': min_key must be bytes, not 'k'"),
        (lambda: file("a", max_key=7), "'a': max_key must be bytes, not 7"),
        (lambda: file("a", "r"), "'a': references must be FileReferences, not 'r'"),
        (lambda: FileWithReferences(filename="a", references=3), "'a': references must be a tuple, not 3"),
        (lambda: replaced("out"), "'j': new_reference must be a FileReference, not 'out'"),
        (lambda: replaced(ref("o"), "o"), "'j': new_file must be a FileWithReferences, not 'o'"),
        (lambda: divided("a", ()), "old_reference must be a FileReference, not 'a'"),
        (lambda: divided(ref("a"), "LR"), "'a': references must be a tuple, not 'LR'"),
    ],
)
def test_a_value_of_another_type_is_named_in_one_line(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"{said}$"):
        make()


def replaced(reference: Any, new_file: Any = None) -> ReplaceFileReferencesRequest:
    return ReplaceFileReferencesRequest(
        job_id="j", partition_id="root", input_filenames=("a",), new_reference=reference, new_file=new_file
    )


def divided(old: Any, new: Any) -> SplitFileReferenceRequest:
    return SplitFileReferenceRequest(old_reference=old, new_references=new)


def test_values_are_frozen_and_can_be_pickled() -> None:
    value = file("a", ref("a"), min_key=b"\x00")
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301
    with pytest.raises(FrozenInstanceError):
        value.filename = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "possible"),
    [
        ("", True),
        ("a", True),
        ("\U0001f42d", True),
        ("\x00", False),
        ("a\ud800", False),
        (b"a", False),
        (None, False),
    ],
)
def test_texts_that_postgresql_can_store_are_recognised(value: object, possible: bool) -> None:
    assert is_text(value) is possible


@given(st.lists(st.text() | st.sampled_from(["a", "é" * 5, "x" * 10, "", "x" * 11, "\0", "\ud800", 7, None])))
def test_checking_texts_together_gives_the_same_error_as_one_by_one(values: list[object]) -> None:
    def refusal(check: Callable[[], None]) -> str:
        try:
            check()
        except InvalidInput as error:
            return str(error)
        return ""

    def one_by_one() -> None:
        for value in values:
            check_text("name", value, 10)

    assert refusal(lambda: check_texts("name", values, 10)) == refusal(one_by_one)
