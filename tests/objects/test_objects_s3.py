"""Stores in S3: uploads in parts, bulk deletions, and endpoints that are down or wrong."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext

from dormouse.data.object_access import register
from dormouse.errors import ObjectAlreadyExists, ObjectStoreError
from dormouse.objects import s3
from dormouse.objects.s3 import SINGLE_PUT_BYTES_MAX
from tests.support.objects import ObjectStore, open_store

MEBIBYTE = 2**20
SPAWN = multiprocessing.get_context("spawn")


def write(path: Path, mebibytes: int) -> None:
    with path.open("wb") as file:
        for number in range(mebibytes):
            file.write(bytes([number % 251]) * MEBIBYTE)


def test_a_large_file_is_uploaded_whole_and_only_once(s3_store: ObjectStore) -> None:
    mebibytes = SINGLE_PUT_BYTES_MAX // MEBIBYTE + 1
    with s3_store.staged("big") as path:
        write(path, mebibytes)
    with s3_store.reader("big") as reader:
        for number in range(mebibytes):
            assert reader.read(MEBIBYTE) == bytes([number % 251]) * MEBIBYTE
        assert reader.read(1) == b""
    with pytest.raises(ObjectAlreadyExists), s3_store.staged("big") as path:
        write(path, 1)


def test_a_large_file_does_not_replace_an_object_written_meanwhile(s3_store: ObjectStore) -> None:
    with pytest.raises(ObjectAlreadyExists), s3_store.staged("big") as path:
        write(path, SINGLE_PUT_BYTES_MAX // MEBIBYTE + 1)
        s3_store.put("big", b"fast")
    assert s3_store.get("big") == b"fast"


def peak_mebibytes() -> int:
    """Returns the peak memory of this process since exec. That of getrusage would include its parent's."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


def upload(store: ObjectStore, mebibytes: int, grown: multiprocessing.Queue[int]) -> None:
    store.put("warm", b"")
    with store.staged("huge") as path:
        write(path, mebibytes)
        before = peak_mebibytes()
    grown.put(peak_mebibytes() - before)


@pytest.mark.slow
def test_a_large_file_streams_in_bounded_memory(s3_store: ObjectStore) -> None:
    grown = SPAWN.Queue()
    uploader = SPAWN.Process(target=upload, args=(s3_store, 192, grown))
    uploader.start()
    assert grown.get(timeout=60) < 128
    uploader.join(60)
    assert s3_store.size("huge") == 192 * MEBIBYTE


def test_missing_options_come_from_the_aws_variables(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(key, value)
    store = open_store("s3://dormouse-test/environment", staging_dir=tmp_path)
    with store.staged("a.parquet") as path:
        pq.write_table(pa.table({"n": [1, 2]}), path)
    context = SessionContext()
    register(context, store)
    context.register_parquet("t", store.uri("a.parquet"))
    assert context.sql("select sum(n) s from t").to_pylist() == [{"s": 3}]


@pytest.mark.parametrize(
    "action",
    [
        lambda store: store.put("a/b", b""),
        lambda store: list(store.list("a/b")),
        lambda store: raise_first(store.delete(["a/b"])),
        lambda store: store.get("a/b"),
    ],
)
def test_a_missing_bucket_is_reported_in_one_line(
    s3_options: dict[str, str], action: Callable[[ObjectStore], object]
) -> None:
    store = open_store("s3://no-such-bucket/x", **s3_options)
    with pytest.raises(ObjectStoreError, match=r"'a/b' in s3://no-such-bucket/x: .*bucket does not exist"):
        action(store)


@pytest.mark.slow
def test_missing_credentials_are_reported_in_one_line(
    s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    without = {name: value for name, value in s3_options.items() if not name.endswith("access_key_id")}
    without.pop("secret_access_key")
    with pytest.raises(ObjectStoreError, match=r"'a/b' in s3://\S+: there are no AWS credentials: set AWS_"):
        open_store("s3://dormouse-test/x", **without).get("a/b")


def raise_first(failed: Sequence[tuple[str, Exception]]) -> None:
    raise failed[0][1]


def test_an_endpoint_that_is_down_is_reported_in_one_line(
    s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRIES_MAX", 1)
    store = open_store("s3://dormouse-test/x", **s3_options | {"endpoint": "http://127.0.0.1:1"})
    failed = store.delete(["a", "b"])
    assert [name for name, _ in failed] == ["a", "b"]
    assert all("\n" not in str(error) and "'" + name + "'" in str(error) for name, error in failed)


def test_one_object_that_cannot_be_deleted_does_not_stop_the_others(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "locked", "z"):
        s3_store.put(name, b"")
    delete = obstore.delete

    def refuse(store: object, paths: str | list[str]) -> None:
        if "locked" in paths:
            raise obstore.exceptions.GenericError("AccessDenied")
        delete(store, paths)

    monkeypatch.setattr(obstore, "delete", refuse)
    failed = s3_store.delete(["a", "locked", "z"])
    assert [(name, type(error)) for name, error in failed] == [("locked", ObjectStoreError)]
    assert list(s3_store.list()) == [("locked", 0)]
