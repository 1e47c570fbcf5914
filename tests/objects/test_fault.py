"""Objects that differ from their record. Each difference is found, and one text describes it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import xxhash

from dormouse.errors import ObjectStoreError
from dormouse.objects import fault as module
from dormouse.objects.fault import (
    MISSING,
    SHA256,
    WrittenObject,
    compared,
    copied,
    digest_of_file,
    digest_of_object,
    fault_of,
    read_back,
    unreadable,
)
from dormouse.objects.folder import FolderStore
from tests.support.objects import ObjectStore, open_store

DATA = b"0123456789" * 1_000
OURS, STRANGERS = xxhash.xxh3_128(DATA).digest(), sha256(DATA).digest()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    made = open_store(tmp_path / "objects")
    made.put("a/b", DATA)
    return made


@pytest.mark.parametrize("digest", [OURS, STRANGERS, None], ids=["xxh3", "sha256", "none"])
@pytest.mark.parametrize("deep", [False, True])
def test_an_unchanged_object_has_no_fault(store: ObjectStore, digest: bytes | None, deep: bool) -> None:
    assert fault_of(store, WrittenObject("a/b", len(DATA), digest), deep=deep) is None
    assert fault_of(store, WrittenObject("a/b", None, digest), deep=deep) is None
    assert read_back(store, WrittenObject("a/b", len(DATA), digest)) == (DATA, None)


@pytest.mark.parametrize("digest", [OURS, STRANGERS], ids=["xxh3", "sha256"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_missing_object_and_an_object_of_another_size_are_found(
    store: ObjectStore, digest: bytes, deep: bool
) -> None:
    assert fault_of(store, WrittenObject("a/c", 7, digest), deep=deep) is MISSING
    assert read_back(store, WrittenObject("a/c", 7, digest)) == (b"", MISSING)
    fault = fault_of(store, WrittenObject("a/b", 10_001, digest), deep=deep)
    assert fault is not None
    assert (fault.kind, str(fault)) == ("object_size", "has 10,000 bytes, and was written with 10,001")


@pytest.mark.parametrize("digest", [OURS, STRANGERS], ids=["xxh3", "sha256"])
def test_one_changed_byte_is_found_by_either_digest(tmp_path: Path, digest: bytes) -> None:
    other = b"1" + DATA[1:]
    store = open_store(tmp_path / "objects")
    store.put("a/b", other)
    written = WrittenObject("a/b", len(DATA), digest)
    assert fault_of(store, written) is None  # its size is the recorded one
    found = (xxhash.xxh3_128 if digest == OURS else sha256)(other).hexdigest()
    for fault in (fault_of(store, written, deep=True), read_back(store, written)[1]):
        assert fault is not None
        assert fault.kind == "object_digest"
        assert fault.text == (
            f"does not have the bytes that were written: its digest is {found}, and was {digest.hex()}"
        )


def test_digests_of_two_kinds_are_not_compared() -> None:
    written = WrittenObject("a/b", len(DATA), STRANGERS)
    assert compared(written, len(DATA), OURS) is None
    assert compared(written, None) is MISSING


def test_a_failing_store_is_not_reported_as_a_fault_of_the_object(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FolderStore, name: str) -> int:
        raise ObjectStoreError(f"cannot read {name}: out of order")

    monkeypatch.setattr(FolderStore, "size", fail)
    with pytest.raises(ObjectStoreError, match="out of order"):
        fault_of(store, WrittenObject("a/b", 1))
    assert unreadable(OSError("out of order")).text == "cannot be read: out of order"


def test_a_digest_is_streamed_and_can_be_stopped(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 1_000)
    calls: list[int] = []
    assert digest_of_object(store, "a/b", lambda: calls.append(1)) == (10_000, OURS)
    assert digest_of_object(store, "a/b", kind=SHA256) == (10_000, STRANGERS)
    assert copied(store, "a/b", tmp_path / "copy", lambda: calls.append(1)) == (10_000, OURS)
    assert len(calls) == 20
    assert (tmp_path / "copy").read_bytes() == DATA
    assert digest_of_file(tmp_path / "copy", SHA256) == STRANGERS

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fault_of(store, WrittenObject("a/b", None, OURS), deep=True, go_on=stop)
