"""Ledgers of objects: missing objects are found, expired ones are swept, unknown ones are listed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import xxhash

from dormouse.errors import InvalidName, ObjectAlreadyExists, ObjectStoreError
from dormouse.objects.folder import FolderStore
from dormouse.objects.ledger import Ledger, LedgerObject, faults, put_new, sweep, unknown_pages
from tests.support.objects import ObjectStore, open_store


@dataclass
class Memory:
    """A ledger in memory, without a database."""

    rows: dict[str, LedgerObject] = field(default_factory=dict)
    prefix: str = "kind"

    def written(self) -> Iterator[LedgerObject]:
        yield from list(self.rows.values())

    def unknown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.rows]

    def expired(self, size: int) -> Iterator[list[tuple[str, int | None]]]:
        while page := [(one.name, one.byte_count) for one in self.rows.values() if not one.needed][:size]:
            yield page

    def forget(self, names: list[str]) -> None:
        for name in names:
            del self.rows[name]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "objects")


@pytest.fixture
def ledger(store: ObjectStore) -> Memory:
    """Returns a ledger of ten objects; those with even numbers are needed."""
    made = Memory()
    for number in range(10):
        name, data = f"kind/{number}", bytes([number]) * (number + 1)
        put_new(store, name, data)
        digest = xxhash.xxh3_128(data).digest()
        made.rows[name] = LedgerObject(name, len(data), digest, number % 2 == 0)
    return made


def names(store: ObjectStore) -> set[str]:
    return {name for name, _ in store.list()}


def kinds(listed: list[tuple[LedgerObject, object]]) -> dict[str, str]:
    return {one.name: str(fault) for one, fault in listed}


def test_needed_objects_that_differ_are_found(store: ObjectStore, ledger: Memory) -> None:
    assert faults(store, ledger) == []
    store.delete(["kind/1", "kind/2", "kind/4", "kind/6"])
    store.put("kind/4", b"longer")
    store.put("kind/6", b"\x07" * 7)
    shallow = {"kind/2": "is not there", "kind/4": "has 6 bytes, and was written with 5"}
    assert kinds(faults(store, ledger)) == shallow
    deep = kinds(faults(store, ledger, deep=True))
    assert "does not have the bytes that were written" in deep.pop("kind/6")
    assert deep == shallow
    assert len(faults(store, ledger, 1)) == 1


def test_a_missing_object_that_is_no_longer_needed_is_no_fault(
    store: ObjectStore, ledger: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collection marks an object as not needed long before it deletes the object."""
    store.delete(["kind/2", "kind/4"])
    size = FolderStore.size

    def collected(self: FolderStore, name: str) -> int:
        ledger.rows["kind/2"] = replace(ledger.rows["kind/2"], needed=False)
        return size(self, name)

    monkeypatch.setattr(FolderStore, "size", collected)
    assert kinds(faults(store, ledger)) == {"kind/4": "is not there"}


def test_an_object_written_after_the_listing_is_no_fault(
    store: ObjectStore, ledger: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FolderStore.list
    monkeypatch.setattr(FolderStore, "list", lambda self, prefix="": iter(list(real(self, prefix))[:3]))
    assert faults(store, ledger) == []


def test_a_sweep_deletes_objects_then_rows_page_by_page(store: ObjectStore, ledger: Memory) -> None:
    reported: list[int] = []
    forgotten: list[list[str]] = []

    def forget(gone: list[str]) -> None:
        assert names(store).isdisjoint(gone), "objects are deleted before their rows"
        forgotten.append(gone)
        ledger.forget(gone)

    done = sweep(store, ledger.expired(2), forget, lambda count, total: reported.append(count))
    assert (done.objects, done.deleted, done.bytes, done.failures) == (5, 5, 2 + 4 + 6 + 8 + 10, 0)
    assert [len(page) for page in forgotten] == [2, 2, 1]
    assert reported == [2, 4, 5]
    assert names(store) == set(ledger.rows) == {f"kind/{number}" for number in range(0, 10, 2)}


def test_an_object_that_cannot_be_deleted_keeps_its_row_and_is_reported(
    store: ObjectStore, ledger: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delete = FolderStore.delete

    def some(self: FolderStore, given: Sequence[str]) -> list[tuple[str, Exception]]:
        refused = [(name, ObjectStoreError("no right to it")) for name in given if name == "kind/3"]
        return [*delete(self, [name for name in given if name != "kind/3"]), *refused]

    monkeypatch.setattr(FolderStore, "delete", some)
    with caplog.at_level(logging.WARNING):
        done = sweep(store, [next(ledger.expired(10))], ledger.forget).warn()
    assert (done.objects, done.failures, done.failed) == (4, 1, [("kind/3", "no right to it")])
    assert "kind/3 is no longer needed but could not be deleted: no right to it" in caplog.text
    assert "kind/3" in ledger.rows and "kind/1" not in ledger.rows
    monkeypatch.undo()
    # as after a crash between the two deletions: the object is deleted, and its row is retried
    store.delete(["kind/3"])
    assert sweep(store, ledger.expired(10), ledger.forget).objects == 1
    assert "kind/3" not in ledger.rows


def test_unknown_objects_are_listed_by_pages(store: ObjectStore, ledger: Memory) -> None:
    for number in range(5):
        store.put(f"other/{number}", b"x" * number)
    known: Ledger = ledger
    pages = list(unknown_pages(sorted(store.list()), known.unknown, 4))
    assert [one for page in pages for one in page] == [(f"other/{number}", number) for number in range(5)]
    assert [len(page) for page in pages] == [0, 0, 2, 3]


def test_a_retried_write_of_the_same_bytes_is_no_conflict(store: ObjectStore) -> None:
    put_new(store, "a", b"1")
    put_new(store, "a", b"1")
    with pytest.raises(ObjectAlreadyExists):
        put_new(store, "a", b"2")
    with pytest.raises(InvalidName):
        put_new(store, "../a", b"1")
