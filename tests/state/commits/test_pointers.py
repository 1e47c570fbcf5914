"""Requests too large for a message travel as an object and a pointer to it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from queues import WAIT_SECONDS, bodies

from dormouse.errors import InvalidCommitRequest, ObjectAlreadyExists, ObjectStoreError
from dormouse.postgres import ConnectionSupplier
from dormouse.state.commits import pointers as module
from dormouse.state.commits.pointers import object_of
from dormouse.state.commits.requests import decode
from dormouse.state.commits.sqs_queue import SqsQueue
from tests.stored import query
from tests.support.commits import DeleteCollectedFiles, PointerQueue, PostgresQueue, encode
from tests.support.model import narrow_id
from tests.support.objects import ObjectStore, open_store

SMALL_BYTES = 1_000


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "objects")


@pytest.fixture
def inner(lender: ConnectionSupplier, number: int) -> PostgresQueue:
    return PostgresQueue(lender, number, body_bytes_max=SMALL_BYTES)


@pytest.fixture
def large(inner: PostgresQueue, objects: ObjectStore) -> PointerQueue:
    return PointerQueue(inner, objects)


def request(commit_id: str = "c1", files: int = 1_000) -> DeleteCollectedFiles:
    return DeleteCollectedFiles(
        commit_id=commit_id, table="t", filenames=tuple(f"data/{n}" for n in range(files))
    )


def names(objects: ObjectStore) -> list[str]:
    return sorted(name for name, _ in objects.list())


def test_a_large_request_arrives_whole_and_leaves_nothing(
    large: PointerQueue, inner: PostgresQueue, objects: ObjectStore
) -> None:
    large.send([encode(request()), encode(request("c2", 1))])
    assert len(names(objects)) == 1
    messages = large.receive(10)
    assert [decode(message.body).request for message in messages] == [request(), request("c2", 1)]
    large.delete(messages)
    assert names(objects) == []
    assert inner.depth().messages == large.depth().messages == 0


def test_a_pointer_is_found_by_its_commit(
    large: PointerQueue, lender: ConnectionSupplier, objects: ObjectStore
) -> None:
    large.send([encode(request("c9"))])
    text = "select body from commit_message where commit_key = %s"
    ((pointer,),) = query(lender, text, narrow_id("c9"))
    assert json.loads(pointer)["object"] == names(objects)[0]
    assert names(objects)[0].startswith(f"commits/{narrow_id('c9').hex}-")


def test_a_request_sent_twice_has_two_objects(large: PointerQueue) -> None:
    large.send([encode(request())])
    large.send([encode(request())])
    first, second = large.receive(2)
    large.delete([first])
    large.retry_later([second], 0)
    (again,) = large.receive(2, WAIT_SECONDS)
    assert decode(again.body).request == request()
    assert again.receive_count == 2


def test_a_dead_letter_keeps_its_object(
    large: PointerQueue, lender: ConnectionSupplier, number: int, objects: ObjectStore
) -> None:
    large.send([encode(request())])
    large.bury(large.receive(1), "bad")
    ((body,),) = query(lender, "select body from dead_commit_message where queue = %s", number)
    assert names(objects) == [object_of(body)]


def test_a_pointer_whose_object_was_deleted_is_refused_when_it_is_read(
    large: PointerQueue, objects: ObjectStore
) -> None:
    large.send([encode(request()), encode(request("c2", 1))])
    objects.delete(names(objects))
    gone, fine = large.receive(10)
    assert decode(fine.body).request == request("c2", 1)
    with pytest.raises(
        InvalidCommitRequest, match=r"'c1': its body, the object 'commits/.* no longer exists"
    ):
        decode(gone.body)


def test_an_object_that_cannot_be_read_now_holds_up_no_other_message(
    large: PointerQueue,
    objects: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    large.send([encode(request()), encode(request("c2", 1))])
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)

    def fails(name: str) -> Any:
        raise ObjectStoreError(f"Cannot read object {name!r}: no route to host")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(type(objects), "get", lambda self, name: fails(name))
        (fine,) = large.receive(10)
    assert decode(fine.body).request == request("c2", 1)
    assert "no route to host" in caplog.text
    (later,) = large.receive(10, WAIT_SECONDS)
    assert decode(later.body).request == request()


@pytest.mark.parametrize(
    "name",
    [
        "data/t1/0-root.parquet",
        "commits/../data/t1/0-root.parquet",
        f"commits/{'0' * 32}-{'0' * 32}.json/../../x",
        f"commits/{'0' * 32}-{'0' * 32}.json\n",
        7,
        None,
    ],
)
def test_a_forged_pointer_reads_and_deletes_nothing(
    large: PointerQueue, objects: ObjectStore, name: Any
) -> None:
    objects.put("data/t1/0-root.parquet", b"precious")
    forged = f'{{"version":1,"type":"pointer","commit_id":"c1","object":{json.dumps(name)}}}'
    large.send([forged])
    messages = large.receive(10)
    assert bodies(messages) == [forged]
    large.delete(messages)
    assert names(objects) == ["data/t1/0-root.parquet"]


def test_an_object_that_is_no_text_is_refused(
    large: PointerQueue, objects: ObjectStore, inner: PostgresQueue
) -> None:
    name = f"commits/{'0' * 32}-{'1' * 32}.json"
    objects.put(name, b"\xff\xfe")
    inner.send([f'{{"version":1,"type":"pointer","commit_id":"c1","object":"{name}"}}'])
    (message,) = large.receive(1)
    with pytest.raises(InvalidCommitRequest):
        decode(message.body)


def test_a_request_too_large_for_an_object_is_refused(
    large: PointerQueue, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_BYTES_MAX", 5_000)
    with pytest.raises(InvalidCommitRequest, match="too large; send several of at most 5000 bytes"):
        large.send([encode(request())])
    assert large.receive(10) == []
    assert names(objects) == []


def test_a_write_that_succeeded_without_an_answer_is_no_error(
    large: PointerQueue, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's client repeats a write whose answer is lost, and finds the object that it wrote."""
    put = type(objects).put

    def twice(self: Any, name: str, data: bytes) -> None:
        put(self, name, data)
        raise ObjectAlreadyExists(f"Object {name!r} exists already")

    monkeypatch.setattr(type(objects), "put", twice)
    large.send([encode(request())])
    (message,) = large.receive(1)
    assert decode(message.body).request == request()


def test_a_large_request_travels_through_sqs(
    new_sqs_queue: Any, sqs_options: dict[str, str], s3_store: ObjectStore
) -> None:
    queue = PointerQueue(SqsQueue(new_sqs_queue(), **sqs_options), s3_store)
    sent = request(files=100_000)
    queue.send([encode(sent)])
    messages = queue.receive(10)
    assert [decode(message.body).request for message in messages] == [sent]
    queue.delete(messages)
    assert names(s3_store) == []
    assert queue.depth().messages == 0
