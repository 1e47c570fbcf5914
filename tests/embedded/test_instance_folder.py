"""Folders of instances: odd names, links, moves and copies, shared use by threads, and closed instances."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InstanceError, InvalidName
from tests.standard import OF_KEYS
from tests.support.api import Instance, Table

SCHEMA = OF_KEYS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a closed instance whose table has one row. Tests copy the folder."""
    folder = tmp_path_factory.mktemp("prepared") / "lake"
    with dm.local(folder) as instance:
        instance.create_table("t", SCHEMA).ingest(pa.table({"key": [0]}))
    return folder


@pytest.fixture(autouse=True)
def without_a_server_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DORMOUSE_DSN", raising=False)


def add_row(folder: Path | str) -> int:
    """Opens the instance and adds a row; returns the number of rows by a query and by SQL."""
    with dm.local(folder) as instance:
        table = instance.table("t")
        table.ingest(pa.table({"key": [1]}))
        rows = table.query().read_all().num_rows
        assert instance.sql("select count(*) as n from t").read_all()["n"].to_pylist() == [rows]
        return rows


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    [
            "ünï ☃ 雪 '\"%20 %s;&$HOME*[a]#frag?x=1 host=evil dbname=x", "back\\slash",
            "x" * 100 + "/" + "y" * 100, "with space", "ünï ☃ 雪", "qu'ote\"s", "a%20b %s",
            "semi;colon&$HOME", "*glob?[a]", "#frag?x=1", "host=evil dbname=x",
        ],
)  # fmt: skip
def test_a_folder_may_have_any_name_and_opens_where_it_was_moved(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    """The name has characters with a meaning in a URL, a shell, a DSN or a pattern, or is too long for a
    socket.
    """
    folder = tmp_path / name
    shutil.copytree(prepared, folder)
    assert add_row(folder) == 2
    moved = folder.rename(tmp_path / "moved")
    assert add_row(moved) == 3
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "new\nline", "return\r", "null\0byte"])
def test_a_name_that_postgresql_cannot_use_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidName, match="without line breaks") as raised:
        dm.local(f"{tmp_path}/{name}" if name else name)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_new_instance_can_be_made_in_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    with dm.local(tmp_path / "ünï" / "qu'o te") as instance:
        assert instance.create_table("t", SCHEMA).ingest(pa.table({"key": [0]})).rows == 1


@pytest.mark.slow
def test_relative_paths_and_links_work_without_a_home(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared, tmp_path / "lake")
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    assert add_row("lake") == 2
    assert add_row("link/../lake") == 3
    with dm.local("link") as by_link, dm.local(tmp_path / "lake") as by_name:
        by_link.table("t").ingest(pa.table({"key": [5]}))
        assert by_name.table("t").query().read_all().num_rows == 4


@pytest.mark.slow
def test_a_relative_instance_stays_itself_when_the_working_folder_changes(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared, tmp_path / "lake")
    monkeypatch.chdir(tmp_path)
    with dm.local("lake") as instance:
        monkeypatch.chdir("/")
        instance.table("t").ingest(pa.table({"key": [1]}))
        assert instance.table("t").query().read_all().num_rows == 2


def test_an_unknown_home_raises_one_clear_error() -> None:
    with pytest.raises(InstanceError, match="home"):
        dm.local("~nobody-of-this-name/lake")


@pytest.mark.slow
def test_a_copy_is_an_instance_of_its_own(prepared: Path, tmp_path: Path) -> None:
    """A copy by cp is tested too. It has an owner and permissions that PostgreSQL does not accept."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        shutil.copytree(prepared, folder)
        (folder / "postgres").chmod(0o755)
    with dm.local(folders[0]) as one, dm.local(folders[1]) as two:
        one.table("t").ingest(pa.table({"key": [1, 2]}))
        assert [i.table("t").query().read_all().num_rows for i in (one, two)] == [3, 1]


@pytest.mark.slow
def test_threads_of_one_process_share_a_folder(tmp_path: Path) -> None:
    """All threads open the new folder at once, and close it in any order."""
    rows: list[Any] = []
    together = threading.Barrier(3)

    def work(number: int) -> None:
        try:
            together.wait(60)
            with dm.local(tmp_path / "lake") as instance:
                instance.create_table(f"t{number}", SCHEMA).ingest(pa.table({"key": [number]}))
                rows.append(instance.table(f"t{number}").query().read_all()["key"].to_pylist())
        except BaseException as error:
            rows.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(rows, key=str) == [[0], [1], [2]]


@pytest.fixture(scope="module")
def closed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Table]]:
    folder = tmp_path_factory.mktemp("closed") / "lake"
    shutil.copytree(prepared, folder)
    instance = dm.local(folder)
    table = instance.table("t")
    instance.close()
    yield instance, table
    instance.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda i, t: i.tables(), lambda i, t: i.table("t"), lambda i, t: i.create_table("u", SCHEMA),
        lambda i, t: i.drop_table("t"), lambda i, t: i.rename_table("t", "u"), lambda i, t: i.sql("select 1"),
        lambda i, t: i.explain_sql("select * from t"), lambda i, t: i.__enter__(),
        lambda i, t: t.ingest(pa.table({"key": [1]})), lambda i, t: t.ingest("nowhere.parquet"),
        lambda i, t: t.query(), lambda i, t: t.explain(), lambda i, t: t.sql("select * from t"),
        lambda i, t: t.compact(), lambda i, t: t.split(), lambda i, t: t.collect_garbage(),
        lambda i, t: list(t.garbage_ready()), lambda i, t: t.set_properties(gc_delay_seconds=1),
        lambda i, t: t.status(), lambda i, t: list(t.files.file_references()),
        lambda i, t: t.files.has_no_files(), lambda i, t: t.partitions.leaves(),
        lambda i, t: t.partitions.tree(),
    ],
)  # fmt: skip
def test_every_call_of_a_closed_instance_says_that_it_is_closed(
    closed: tuple[Instance, Table], use: Callable[[Instance, Table], Any]
) -> None:
    with pytest.raises(InstanceError, match=r"^the instance is closed$"):
        use(*closed)


def test_a_closed_instance_answers_calls_that_need_no_database(
    closed: tuple[Instance, Table],
) -> None:
    instance, table = closed
    assert (table.name, table.schema, instance.read_only) == ("t", SCHEMA, False)
