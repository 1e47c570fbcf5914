"""The contract of object stores: one set of tests, run on a folder and on S3."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext

from dormouse.data.object_access import open_parquet, register
from dormouse.errors import InvalidName, ObjectAlreadyExists, ObjectNotFound, ObjectStoreError
from tests.forks import FORKS
from tests.support.objects import ObjectStore, open_store

WAIT_SECONDS = 60


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return open_store(tmp_path / "objects")
    return request.getfixturevalue("s3_store")


def staged_files(store: ObjectStore, tmp_path: Path) -> list[Path]:
    """Returns the files in the staging area of either store."""
    area = Path(store.options["staging_dir"]) if store.options else tmp_path / "objects" / ".staging"
    return [path for path in area.rglob("*") if path.is_file()]


@pytest.mark.few(1)
def test_a_listing_has_times(store: ObjectStore) -> None:
    store.put("a/b", b"xyz")
    [(name, size, written_at)] = store.list_dated("a")
    assert (name, size) == ("a/b", 3)
    assert abs(datetime.now(UTC) - written_at) < timedelta(minutes=5)


@pytest.mark.few(1)
def test_an_object_is_read_back_as_it_was_put(store: ObjectStore) -> None:
    store.put("data/t1/ab12/0-root.parquet", b"\x00whole\xff")
    store.put("empty", b"")
    assert store.get("data/t1/ab12/0-root.parquet") == b"\x00whole\xff"
    assert store.size("data/t1/ab12/0-root.parquet") == 7
    assert (store.get("empty"), store.size("empty")) == (b"", 0)


def test_a_range_has_exactly_the_requested_bytes_or_raises(store: ObjectStore) -> None:
    store.put("a/b", b"0123456789")
    assert store.get_range("a/b", 0, 10) == b"0123456789"
    assert store.get_range("a/b", 3, 4) == b"3456"
    for start, length in ((8, 3), (10, 1), (50, 5)):
        with pytest.raises(ObjectStoreError, match="'a/b'"):
            store.get_range("a/b", start, length)
    with pytest.raises(ObjectNotFound, match="'a/c'"):
        store.get_range("a/c", 0, 1)


def test_a_name_is_never_used_twice(store: ObjectStore) -> None:
    store.put("a/b", b"first")
    with pytest.raises(ObjectAlreadyExists, match="'a/b'"):
        store.put("a/b", b"second")
    with pytest.raises(ObjectAlreadyExists, match="'a/b'"), store.staged("a/b") as path:
        path.write_bytes(b"third")
    assert store.get("a/b") == b"first"


def test_a_name_that_is_taken_while_its_object_is_staged_is_refused(
    store: ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(ObjectAlreadyExists), store.staged("a/b") as path:
        path.write_bytes(b"slow")
        store.put("a/b", b"fast")
    assert store.get("a/b") == b"fast"
    assert staged_files(store, tmp_path) == []


def test_a_staged_object_is_invisible_until_its_writer_is_done(store: ObjectStore, tmp_path: Path) -> None:
    with store.staged("a/b.parquet") as path:
        path.write_bytes(b"whole")
        assert path.name == "b.parquet"
        assert list(store.list()) == []
        with pytest.raises(ObjectNotFound):
            store.get("a/b.parquet")
    assert list(store.list()) == [("a/b.parquet", 5)]
    assert staged_files(store, tmp_path) == []


def test_a_writer_that_fails_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(KeyError), store.staged("a/b") as path:
        path.write_bytes(b"half")
        path.with_name("helper").write_bytes(b"left behind")
        raise KeyError
    assert list(store.list()) == []
    assert staged_files(store, tmp_path) == []


def test_a_writer_that_writes_nothing_gets_an_error(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ObjectStoreError, match="nothing was written"), store.staged("a"):
        pass
    assert list(store.list()) == []
    assert staged_files(store, tmp_path) == []


def test_a_staged_file_may_be_replaced_by_renaming(store: ObjectStore) -> None:
    """Some engines write beside the path and rename the result to it at the end."""
    with store.staged("a") as path:
        path.with_name("a.tmp").write_bytes(b"renamed")
        path.with_name("a.tmp").rename(path)
    assert store.get("a") == b"renamed"


def test_a_missing_object_is_not_found(store: ObjectStore) -> None:
    store.put("a/b", b"")
    for name in ("c", "a", "a/c"):
        for read in (store.get, store.size, store.reader):
            with pytest.raises(ObjectNotFound, match=repr(name)):
                read(name)


def test_every_method_refuses_a_name_that_leaves_the_store(store: ObjectStore) -> None:
    for method in (store.get, store.size, store.reader, store.local_path, store.uri):
        with pytest.raises(InvalidName):
            method("../x")
    with pytest.raises(InvalidName):
        store.put("../x", b"")
    with pytest.raises(InvalidName), store.staged("../x"):
        pass
    with pytest.raises(InvalidName):
        list(store.list("../x"))


def test_delete_removes_existing_objects_and_returns_failures(store: ObjectStore) -> None:
    for name in ("a/1", "a/2", "b/1"):
        store.put(name, b"")
    failed = store.delete(["a/1", "missing", "a/missing", "../etc", "a/1", "b/1"])
    assert [(name, type(error)) for name, error in failed] == [("../etc", InvalidName)]
    assert list(store.list()) == [("a/2", 0)]
    assert store.delete([]) == []


def test_a_prefix_matches_whole_segments(store: ObjectStore) -> None:
    sizes = {"data/t1/a": 1, "data/t1/b/c": 2, "data/t10/a": 3, "data/t1.x": 4}
    for name, size in sizes.items():
        store.put(name, b"x" * size)
    assert dict(store.list()) == sizes
    assert dict(store.list("data/t1")) == dict(store.list("data/t1/")) == {"data/t1/a": 1, "data/t1/b/c": 2}
    assert list(store.list("data/t1/a")) == list(store.list("data/t2")) == []


@pytest.mark.slow
def test_more_objects_than_a_page_are_listed_and_deleted(store: ObjectStore) -> None:
    """The S3 of the tests lists pages of 100 objects. At most 1,000 names are deleted at once, even absent
    ones.
    """
    names = [f"many/{number}" for number in range(201)]
    for name in names:
        store.put(name, b"")
    assert sorted(name for name, _ in store.list("many")) == sorted(names)
    absent = [f"absent/{number}" for number in range(1_000)]
    assert store.delete([*names[:100], *absent, *names[100:]]) == []
    assert list(store.list()) == []


def test_a_reader_reads_and_seeks(store: ObjectStore) -> None:
    data = bytes(range(256)) * 10_000
    store.put("a", data)
    with store.reader("a") as reader:
        assert reader.seek(-8, 2) == len(data) - 8
        assert reader.read() == data[-8:]
        assert reader.seek(1_000_000) == 1_000_000
        assert reader.read(300) == data[1_000_000:1_000_300]
        assert reader.tell() == 1_000_300
        reader.seek(0)
        assert reader.read() == data


def test_a_store_opens_again_from_its_pickle_and_from_its_url(store: ObjectStore) -> None:
    store.put("a", b"1")
    for again in (pickle.loads(pickle.dumps(store)), open_store(store.url, **store.options)):  # noqa: S301
        assert again == store
        assert again.get("a") == b"1"


def publish_all(store: ObjectStore, barrier: Barrier, mark: bytes, wins: multiprocessing.Queue[int]) -> None:
    won = 0
    for number in range(20):
        barrier.wait(WAIT_SECONDS)
        try:
            with store.staged(f"race/{number}") as path:
                path.write_bytes(mark * 1_000)
            won += 1
        except ObjectAlreadyExists:
            pass
    wins.put(won)


@pytest.mark.slow
def test_of_two_processes_that_publish_one_name_exactly_one_wins(store: ObjectStore) -> None:
    barrier, wins = FORKS.Barrier(2), FORKS.Queue()
    writers = [FORKS.Process(target=publish_all, args=(store, barrier, mark, wins)) for mark in (b"a", b"b")]
    for writer in writers:
        writer.start()
    assert sum(wins.get(timeout=WAIT_SECONDS) for _ in writers) == 20
    for writer in writers:
        writer.join(WAIT_SECONDS)
    assert {store.get(f"race/{number}") for number in range(20)} <= {b"a" * 1_000, b"b" * 1_000}


def stage_forever(store: ObjectStore, staged: Event) -> None:
    with store.staged("killed/a") as path:
        path.write_bytes(b"half")
        staged.set()
        signal.pause()


def test_a_killed_writer_leaves_nothing_visible_and_is_swept(store: ObjectStore, tmp_path: Path) -> None:
    staged = FORKS.Event()
    writer = FORKS.Process(target=stage_forever, args=(store, staged))
    writer.start()
    assert staged.wait(WAIT_SECONDS)
    assert store.sweep_staging() == 0  # the writer is still alive
    writer.kill()
    writer.join(WAIT_SECONDS)
    assert list(store.list()) == []
    assert len(staged_files(store, tmp_path)) == 2  # the file and the lock
    with store.staged("alive") as path:
        path.write_bytes(b"mine")
        assert store.sweep_staging() == 1
    assert staged_files(store, tmp_path) == []
    assert list(store.list()) == [("alive", 4)]


def test_sweeping_an_unused_store_does_nothing(store: ObjectStore) -> None:
    assert store.sweep_staging() == 0


@pytest.mark.slow
def test_concurrent_sweeps_and_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path / "objects")
    with repeating(store.sweep_staging):
        for number in range(150):
            store.put(f"a/{number}", b"x")
    assert len(list(store.list())) == 150


class repeating:  # noqa: N801
    """A thread that calls a function repeatedly, and raises its exception at the end."""

    def __init__(self, call: object) -> None:
        self.call, self.stop, self.error = call, threading.Event(), None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.call()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(WAIT_SECONDS)
        if self.error:
            raise self.error


@pytest.mark.few(1)
def test_a_listing_during_a_storm_of_puts_has_only_whole_objects(store: ObjectStore) -> None:
    seen: set[tuple[str, int]] = set()
    with repeating(lambda: seen.update(store.list("storm"))):
        for number in range(30):
            with store.staged(f"storm/{number}") as path, path.open("wb") as file:
                for _ in range(10):
                    file.write(b"x" * 10_000)
                    file.flush()
    assert {size for _, size in seen} == {100_000}


@pytest.mark.slow
def test_publishing_into_a_folder_that_is_being_emptied_succeeds(store: ObjectStore) -> None:
    """A deletion removes empty folders, even one into which a writer is about to publish."""

    def churn() -> None:
        store.delete(["shared/deep/er/none", *(name for name, _ in store.list("shared/deep/er"))])

    with repeating(churn):
        for number in range(150):
            store.put(f"shared/deep/er/{number}", b"x")
    churn()
    assert list(store.list()) == []


@pytest.fixture
def written(store: ObjectStore) -> str:
    """Returns the name of a Parquet object of 100,000 rows."""
    with store.staged("data/t=1/0-root.parquet") as path:
        pq.write_table(pa.table({"n": range(100_000)}), path, row_group_size=10_000)
    return "data/t=1/0-root.parquet"


def test_datafusion_reads_an_object_by_its_uri(store: ObjectStore, written: str) -> None:
    context = SessionContext()
    register(context, store)
    context.register_parquet("t", store.uri(written))
    assert context.sql("select count(*) c, sum(n) s from t").to_pylist() == [
        {"c": 100_000, "s": 4_999_950_000}
    ]


def test_pyarrow_reads_an_object_by_row_group(store: ObjectStore, written: str) -> None:
    with open_parquet(store, written) as file:
        assert file.metadata.num_rows == 100_000
        assert file.read_row_group(9).column("n")[0].as_py() == 90_000
    with pytest.raises(ObjectNotFound):
        open_parquet(store, "data/none.parquet")
