"""Commit requests: every value survives encoding and decoding, and malformed requests are refused."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from datetime import UTC, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dormouse.errors import InvalidCommitRequest, InvalidInput
from dormouse.model.file_reference import (
    COUNT_MAX,
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.state.commits import encoding
from dormouse.state.commits.queue import queue_number
from dormouse.state.commits.requests import (
    BODY_BYTES_MAX,
    AssignJobIds,
    SplitFileReferences,
    SplitPartition,
    commit_id_of,
    decode,
)
from tests.support.commits import (
    AddFiles,
    CommitRequest,
    DeleteCollectedFiles,
    EditTables,
    Envelope,
    ReplaceFileReferences,
    TableEdit,
    encode,
)
from tests.support.state import KeyBounds, NewDeletion, Read, RowsContent

PATIENT = settings(deadline=None, suppress_health_check=list(HealthCheck))
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAMES = st.text(CHARACTERS, min_size=1, max_size=40)
FILENAMES = NAMES | st.just("𝔻" * 256) | st.just('\ufffe\uffff\x7f\x01"\\/') | st.just("é" * 512)
COUNTS = st.integers(0, COUNT_MAX)
ZONES = st.none() | st.just(UTC) | st.just(timezone(timedelta(hours=-9, minutes=-30)))
TIMES = st.none() | st.datetimes(timezones=ZONES, allow_imaginary=False)
COMMON = {"commit_id": NAMES, "table": NAMES}


def references(filename: Any = FILENAMES, partition_id: Any = NAMES) -> st.SearchStrategy[FileReference]:
    return st.builds(
        FileReference,
        filename=filename,
        partition_id=partition_id,
        row_count=COUNTS,
        job_id=st.none() | NAMES,
        last_updated=TIMES,
        count_approximate=st.booleans(),
        only_contains_data_for_this_partition=st.booleans(),
    )


def files(filename: Any = FILENAMES) -> st.SearchStrategy[FileWithReferences]:
    def of(name: str) -> st.SearchStrategy[FileWithReferences]:
        return st.builds(
            FileWithReferences,
            filename=st.just(name),
            references=st.lists(references(st.just(name)), max_size=3),
            byte_count=st.none() | COUNTS,
            row_count=st.none() | COUNTS,
            min_key=st.none() | st.binary(max_size=20),
            max_key=st.none() | st.binary(max_size=20),
            last_updated=TIMES,
            digest=st.none() | st.binary(min_size=16, max_size=16),
        )

    return filename.flatmap(of)


@st.composite
def replacements(draw: st.DrawFn) -> ReplaceFileReferencesRequest:
    partition_id = draw(NAMES)
    new = draw(st.none() | references(partition_id=st.just(partition_id)))
    return ReplaceFileReferencesRequest(
        job_id=draw(NAMES),
        partition_id=partition_id,
        input_filenames=tuple(draw(st.lists(FILENAMES, min_size=1, max_size=3, unique=True))),
        new_reference=new,
        new_file=None if new is None else draw(st.none() | files(st.just(new.filename))),
    )


@st.composite
def splits(draw: st.DrawFn) -> SplitFileReferenceRequest:
    old = draw(references())
    partitions = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    new = [draw(references(st.just(old.filename), st.just(name))) for name in partitions]
    return SplitFileReferenceRequest(old_reference=old, new_references=tuple(new))


ASSIGNMENTS = st.builds(
    AssignJobIdRequest,
    job_id=NAMES,
    partition_id=NAMES,
    filenames=st.lists(FILENAMES, min_size=1, max_size=3, unique=True),
)
ATTEMPT_IDS = st.uuids().map(lambda u: u.hex)
BOUNDS = st.lists(st.none() | st.binary(max_size=9), max_size=3)
SPANS = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=3)
SNAPSHOTS = st.sets(st.integers(1, (1 << 63) - 2), min_size=1, max_size=5).map(sorted)
EDITS = st.builds(
    EditTables,
    commit_id=NAMES,
    parts=st.lists(
        st.builds(
            TableEdit,
            table=NAMES,
            files=st.lists(files(), max_size=2),
            deletions=st.lists(
                st.builds(
                    NewDeletion,
                    condition=NAMES,
                    bounds=st.builds(KeyBounds, BOUNDS, BOUNDS),
                    by_values=st.booleans(),
                    rows=st.none() | st.builds(RowsContent, NAMES, st.binary(max_size=9)),
                ),
                max_size=2,
            ),
            reads=st.lists(
                st.builds(
                    Read,
                    snapshot=SNAPSHOTS.map(
                        lambda ids: (
                            f"{ids[0]}:{ids[-1] + 1 if ids[1:] else ids[0]}:{','.join(map(str, ids[1:]))}"
                        )
                    ),
                    spans=SPANS,
                    are_keys=st.booleans(),
                ),
                max_size=2,
            ),
            attempt_ids=st.lists(ATTEMPT_IDS, max_size=2),
            schema_version=st.none() | st.integers(1, 9),
            table_id=st.none() | st.integers(0, (1 << 31) - 1),
            table_uuid=st.none() | ATTEMPT_IDS,
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda part: part.table if part.table_id is None else part.table_id,
    ),
)
REQUESTS = st.one_of(
    EDITS,
    st.builds(
        AddFiles,
        **COMMON,
        files=st.lists(files(), min_size=1, max_size=3),
        attempt_id=st.none() | ATTEMPT_IDS,
    ),
    st.builds(AssignJobIds, **COMMON, requests=st.lists(ASSIGNMENTS, min_size=1, max_size=2)),
    st.builds(ReplaceFileReferences, **COMMON, requests=st.lists(replacements(), min_size=1, max_size=2)),
    st.builds(SplitFileReferences, **COMMON, requests=st.lists(splits(), min_size=1, max_size=2)),
    st.builds(DeleteCollectedFiles, **COMMON, filenames=st.lists(FILENAMES, min_size=1, max_size=3)),
    st.builds(
        SplitPartition,
        **COMMON,
        partition_id=NAMES,
        point=st.integers(-(1 << 63), (1 << 63) - 1)
        | st.text(st.characters(exclude_categories=["Cs"]))
        | st.binary(),
        field=st.none() | NAMES,
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def delete(**more: Any) -> DeleteCollectedFiles:
    return DeleteCollectedFiles(**{"commit_id": "c1", "table": "t", "filenames": ("f",), **more})


def body(request: CommitRequest | None = None, **changes: Any) -> str:
    fields = json.loads(encode(request or delete()))
    return json.dumps({**fields, **changes})


def refusal(text: str | bytes) -> str:
    with pytest.raises(InvalidCommitRequest) as caught:
        decode(text)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1_000
    said.encode()
    return said


def test_every_type_is_covered() -> None:
    kinds = {kind.kind for kind in get_args(CommitRequest)}
    assert kinds == {
        "add_files",
        "assign_job_ids",
        "replace_file_references",
        "split_file_references",
        "delete_collected_files",
        "split_partition",
        "edit_tables",
    }


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (FileWithReferences, encoding._File),
        (NewDeletion, encoding._Deletion),
        (RowsContent, encoding._Rows),
        (Read, encoding._Read),
        (TableEdit, encoding._TableEdit),
    ],
)
def test_a_message_has_every_field_of_a_value(kind: Any, shape: Any) -> None:
    assert {field.name for field in fields(kind)} == set(shape.__struct_fields__)


@PATIENT
@given(REQUESTS, st.none() | st.integers(0, (1 << 31) - 1), st.none() | ATTEMPT_IDS)
def test_every_request_survives_the_journey(
    request: CommitRequest, table_id: int | None, table_uuid: str | None
) -> None:
    if isinstance(request, EditTables):
        table_id, table_uuid = request.parts[0].table_id, request.parts[0].table_uuid
    text = encode(request, table_id=table_id, table_uuid=table_uuid)
    assert text.isascii()
    assert "\n" not in text
    assert decode(text) == decode(text.encode()) == Envelope(request, table_id, table_uuid)
    again = decode(text).request
    assert type(again) is type(request)
    assert again.items == request.items or isinstance(request, SplitPartition)
    assert commit_id_of(text) == request.commit_id


@pytest.mark.slow
@PATIENT
@given(st.binary() | st.text() | JSON.map(json.dumps))
@example(b"\xff\xfe")
@example("[" * 100_000)
@example('{"a":' * 100_000)
@example("1" * 100_000)
@example('{"version":1e400}')
@example('{"version":NaN}')
@example('"\\ud800"')
def test_garbage_is_refused_in_one_line(text: str | bytes) -> None:
    refusal(text)


@PATIENT
@given(REQUESTS, st.data())
def test_a_request_with_anything_put_in_its_place_is_refused_or_read(
    request: CommitRequest, data: st.DataObject
) -> None:
    """Any value anywhere in the JSON is replaced by any other."""
    fields = json.loads(encode(request, table_id=7))
    place: Any = fields
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
            place = inner
        else:
            place[key] = data.draw(JSON)
            break
    try:
        decode(json.dumps(fields))
    except InvalidCommitRequest as error:
        assert "\n" not in str(error)


@PATIENT
@given(REQUESTS, st.integers(min_value=0))
def test_a_request_cut_short_is_refused(request: CommitRequest, where: int) -> None:
    text = encode(request)
    refusal(text[: where % len(text)])


def test_a_request_of_a_later_version_asks_for_an_upgrade() -> None:
    said = "version 7 of a commit request is not known; this Dormouse reads version 1: upgrade it"
    assert refusal(body(version=7, novelty=1)) == said
    assert "so large a number" in refusal(body(version=10**4000))
    assert "version" in refusal(body(version=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "drop_table"}, "the type 'drop_table' is not known; known are add_files, "),
        ({"type": ["add_files"]}, "the type ['add_files'] is not known"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"files": []}, "unknown field `files`"),
        ({"commit_id": ""}, "commit_id must be a non-empty string"),
        ({"commit_id": 5}, "Expected `str`, got `int` - at `$.commit_id`"),
        ({"commit_id": "x" * 257}, "must have at most 256 bytes"),
        ({"table": None}, "Expected `str`, got `null` - at `$.table`"),
        ({"table_id": "7"}, "Expected `int | null`, got `str` - at `$.table_id`"),
        ({"table_id": -1}, "Expected `int` >= 0 - at `$.table_id`"),
        ({"table_id": True}, "Expected `int | null`, got `bool` - at `$.table_id`"),
        ({"table_id": 1 << 31}, "Expected `int` <= 2147483647 - at `$.table_id`"),
        ({"filenames": "f"}, "Expected `array`, got `str` - at `$.filenames`"),
        ({"filenames": {"f": 1}}, "Expected `array`, got `object` - at `$.filenames`"),
        ({"filenames": [1]}, "Expected `str`, got `int` - at `$.filenames[0]`"),
        ({"filenames": []}, "filenames must not be empty"),
        ({"filenames": ["\ud800"]}, "cannot be read"),
        ({"filenames": ["a\0b"]}, "no NUL"),
        ({"filenames": ["x" * 1_025]}, "must have at most 1024 bytes"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(body(**changes))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"row_count": -1}, "row_count"),
        ({"row_count": 1.0}, "row_count"),
        ({"row_count": 1 << 63}, "row_count"),
        ({"byte_count": "1"}, "byte_count"),
        ({"digest": "AP8="}, "digest must be 16 bytes"),
        ({"min_key": "not base64!"}, "Invalid base64 encoded string - at `$.files[0].min_key`"),
        ({"max_key": 1}, "Expected `bytes | null`, got `int` - at `$.files[0].max_key`"),
        ({"last_updated": "yesterday"}, "Invalid RFC3339 encoded datetime - at `$.files[0].last_updated`"),
        ({"last_updated": 0}, "Expected `datetime | null`, got `int` - at `$.files[0].last_updated`"),
        ({"references": {}}, "Expected `array`, got `object` - at `$.files[0].references`"),
        ({"references": [1]}, "Expected `object`, got `int` - at `$.files[0].references[0]`"),
        (
            {"references": [{"partition_id": "p"}]},
            "missing required field `row_count` - at `$.files[0].references[0]`",
        ),
        (
            {"references": [{"row_count": 1}]},
            "missing required field `partition_id` - at `$.files[0].references[0]`",
        ),
        (
            {"references": [{"partition_id": "p", "row_count": 1, "filename": "g"}]},
            "unknown field `filename` - at `$.files[0].references[0]`",
        ),
        (
            {"references": [{"partition_id": "p", "row_count": 1, "count_approximate": 1}]},
            "Expected `bool`, got `int` - at `$.files[0].references[0].count_approximate`",
        ),
    ],
)
def test_a_wrong_field_of_a_file_is_named(wrong: dict[str, Any], said: str) -> None:
    request = AddFiles(commit_id="c1", table="t", files=(FileWithReferences(filename="f"),))
    text = body(request, files=[{"filename": "f", **wrong}])
    assert said in refusal(text)
    assert refusal(text).startswith("commit request 'c1': ")


@pytest.mark.parametrize(
    "point",
    [
        7,
        "b",
        None,
        {"int": "7"},
        {"int": True},
        {"str": 7},
        {"bytes": "?"},
        {"int": 1 << 63},
        {},
        {"int": 7, "str": "b"},
    ],
)
def test_a_wrong_split_point_is_refused(point: Any) -> None:
    request = SplitPartition(commit_id="c1", table="t", partition_id="root", point=7)
    said = refusal(body(request, point=point))
    assert "`$.point" in said or "point must" in said


@pytest.mark.parametrize("key", ["version", "type", "commit_id", "table", "filenames"])
def test_a_missing_field_is_named(key: str) -> None:
    fields = json.loads(encode(delete()))
    del fields[key]
    assert key in refusal(json.dumps(fields))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"table": "other"}, "its table must be that of its first part"),
        ({"table_id": 8}, "its table must be that of its first part"),
        ({"parts": []}, "parts must not be empty"),
        ({"parts": [{"table": "t"}, {"table": "t"}]}, "each table must be in one part only"),
        ({"parts": [{"table": "t", "rows": []}]}, "unknown field `rows` - at `$.parts[0]`"),
        ({"parts": [{"table": ""}]}, "the table's name must be a non-empty string"),
        ({"parts": [{"table": "t", "attempt_ids": ["x"]}]}, "attempt_id must be a UUID in hexadecimal"),
        ({"parts": [{"table": "t", "reads": [{"snapshot": "9:1:", "spans": []}]}]}, "snapshot must be"),
        ({"parts": [{"table": "t", "reads": [{"snapshot": "1:3:3", "spans": []}]}]}, "snapshot must be"),
        ({"parts": [{"table": "t", "reads": [{"snapshot": "1:5:4,2", "spans": []}]}]}, "snapshot must be"),
        (
            {"parts": [{"table": "t", "deletions": [{"condition": "{}", "bounds": [[], []]}]}]},
            "missing required field `by_values`",
        ),
        (
            {
                "parts": [
                    {
                        "table": "t",
                        "deletions": [{"condition": "x" * 65_537, "bounds": [[], []], "by_values": True}],
                    }
                ]
            },
            "a deletion's condition 'xxx",
        ),
    ],
)
def test_a_wrong_field_of_an_edit_is_named(wrong: dict[str, Any], said: str) -> None:
    request = EditTables(commit_id="c1", parts=(TableEdit(table="t"), TableEdit(table="u")))
    assert said in refusal(body(request, **wrong))


def test_a_repeated_key_is_refused() -> None:
    assert "a key is there twice" in refusal(body()[:-1] + ', "table": "other"}')


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    assert f"at most {BODY_BYTES_MAX} bytes" in refusal(" " * (BODY_BYTES_MAX + 1))


def test_a_request_that_is_too_large_is_not_encoded() -> None:
    names = [f"{n:06}" + "𝔻" * 200 for n in range(30_000)]
    with pytest.raises(InvalidCommitRequest, match=f"send several, each of at most {BODY_BYTES_MAX} bytes"):
        encode(delete(filenames=names))


def test_a_pointer_without_its_object_is_refused() -> None:
    text = '{"version":1,"type":"pointer","commit_id":"c1","object":"commits/x.json"}'
    assert refusal(text).startswith(
        "commit request 'c1': its body, the object 'commits/x.json', no longer exists"
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: delete(commit_id="\ud800"), "is not valid Unicode"),
        (lambda: delete(filenames="f"), "must be a tuple of str, not 'f'"),
        (lambda: delete(filenames=5), "must be a tuple of str, not 5"),
        (lambda: delete(filenames=[b"f"]), "must hold str, not b'f'"),
        (lambda: AddFiles(commit_id="c1", table="t", files=["f"]), "files must hold FileWithReferences"),
        (lambda: AssignJobIds(commit_id="c1", table="t", requests=()), "requests must not be empty"),
        (
            lambda: SplitPartition(commit_id="c1", table="t", partition_id="p", point=10**5_000),
            "point must fit in 64 bits",
        ),
        (
            lambda: SplitPartition(commit_id="c1", table="t", partition_id="p", point=True),
            "point must be an int, a str, bytes, a datetime or a date",
        ),
        (
            lambda: SplitPartition(commit_id="c1", table="t", partition_id="p", point="\ud800"),
            "is not valid Unicode",
        ),
    ],
)
def test_a_request_is_checked_when_it_is_made(make: Any, said: str) -> None:
    with pytest.raises(InvalidCommitRequest) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize("facts", [{"min_key": "text"}, {"max_key": 7}, {"last_updated": "today"}])
def test_a_fact_of_a_wrong_type_is_not_encoded(facts: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"f.*{next(iter(facts))}"):
        encode(AddFiles(commit_id="c1", table="t", files=[FileWithReferences(filename="f", **facts)]))


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        delete().table = "other"  # type: ignore[misc]


def test_the_commit_id_is_found_without_reading_all() -> None:
    assert commit_id_of(encode(delete(commit_id='a"\\\n𝔻'))) == 'a"\\\n𝔻'
    assert commit_id_of('{"commit_id": "late", "version": 1}') == "late"
    for text in ("", "{}", "garbage", '{"version":1,"commit_id":7}', '{"version":1,"commit_id":"\\ud800"}'):
        assert commit_id_of(text) is None


def test_tables_are_spread_over_queues_the_same_everywhere() -> None:
    assert [queue_number(table_id, 4) for table_id in (1, 2, 3, 4, 5)] == [0, 1, 2, 3, 1]
    assert {queue_number(table_id, 1) for table_id in range(100)} == {0}
    counts = [sum(queue_number(t, 4) == n for t in range(1_000)) for n in range(4)]
    assert min(counts) > 150


def test_an_invalid_request_is_an_invalid_input() -> None:
    assert issubclass(InvalidCommitRequest, InvalidInput)
