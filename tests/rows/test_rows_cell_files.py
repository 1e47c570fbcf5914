"""Files in FILE cells: stored, read, kept for older versions, and dropped with the table to which they
belong.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.errors import (
    BackupDamaged,
    InstanceError,
    InvalidColumn,
    InvalidInput,
    InvalidName,
    InvalidRow,
    ObjectDamaged,
    RowNotFound,
)
from dormouse.rows import cell_files
from dormouse.rows.columns import ColumnType
from tests.serving import serving
from tests.support.rows import RowTable

COLUMNS = [dm.Column("name", "STRING"), dm.Column("photo", "FILE")]
BYTES = bytes(range(256)) * 9_000


@pytest.fixture
def rows(instance: dm.Instance) -> RowTable:
    return instance.create_row_table("samples", COLUMNS)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "Föto 1.jpg"
    path.write_bytes(BYTES)
    return path


def objects_of(instance: dm.Instance) -> list[str]:
    return [name for name, _ in instance.objects.list("row_files")]


def test_a_file_is_read_back_as_it_was_put_also_in_older_versions(
    rows: RowTable, photo: Path, tmp_path: Path
) -> None:
    first = rows.put_file(photo)
    rows.change([dm.Insert([{"name": "a", "photo": first}, {"name": "b"}])])
    photo.write_bytes(b"other")
    rows.change([dm.Patch([{"ROW_ID": 1, "photo": rows.put_file(photo, "2.jpg")}])])
    assert rows.save_file(1, "photo", tmp_path / "new").read_bytes() == b"other"
    assert rows.save_file(1, "photo", tmp_path / "new", version=1).read_bytes() == BYTES
    assert [rows.file(1, "photo", version).name for version in (1, 2)] == ["Föto 1.jpg", "2.jpg"]
    for row, column, kind, said in (
        (2, "photo", RowNotFound, "column 'photo' of row 2 has no file"),
        (1, "name", InvalidColumn, "only columns of type FILE have files"),
        (3, "photo", RowNotFound, "no row"),
    ):
        with pytest.raises(kind, match=said):
            rows.save_file(row, column, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_cell_cannot_refer_to_other_objects(
    instance: dm.Instance, rows: RowTable, photo: Path, tmp_path: Path
) -> None:
    others = instance.create_row_table("others", COLUMNS)
    own = rows.put_file(photo)
    wrong = [
        "instance.json",
        "../../etc/passwd",
        own.replace("file:", "file:../"),
        own[:-1] + "/",
        "data/x/0.parquet",
    ]
    for one in wrong:
        with pytest.raises(InvalidRow, match=r"row 1, column 'photo' .* is no reference to a file"):
            rows.change([dm.Insert([{"photo": one}])])
    digest = own.split(":")[3]
    for table, one in ((others, own), (rows, own.replace(digest, "0" * 64))):
        with pytest.raises(InvalidRow, match=r"row 2, column 'photo' .* was not put into this table"):
            table.change([dm.Insert([{"name": "a"}, {"photo": one}])])
    assert (rows.version(), others.version()) == (0, 0)
    for name in ("", "a/b", "..", ".bashrc", "a\nb", "x" * 256):
        with pytest.raises((InvalidName, InvalidInput)):
            rows.put_file(photo, name or "/")
    with pytest.raises(InvalidInput, match="cannot read"):
        rows.put_file(tmp_path / "missing")


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_file_that_is_lost_is_named_without_a_path_of_the_server(
    instance: dm.Instance, rows: RowTable, photo: Path, tmp_path: Path, is_noted: bool
) -> None:
    reference = rows.put_file(photo)
    if not is_noted:  # the form of earlier releases
        with instance._supplier.connection() as conn:
            conn.execute("delete from cell_file")
    rows.change([dm.Insert([{"photo": reference}])])
    instance.objects.delete(objects_of(instance))
    for read in (lambda: rows.file(1, "photo"), lambda: rows.save_file(1, "photo", tmp_path / "none")):
        with pytest.raises(RowNotFound, match="the file in column 'photo' of row 1 is lost") as lost:
            read()
        assert str(tmp_path) not in str(lost.value)
    # a cell may keep a known file, even a lost one; an unknown file must exist
    if is_noted:
        rows.change([dm.Patch([(1, None, {"photo": reference})])])
    else:
        with pytest.raises(InvalidRow, match="was not put into this table"):
            rows.change([dm.Patch([(1, None, {"photo": reference})])])


def test_a_default_has_the_form_of_its_type_except_in_existing_columns(instance: dm.Instance) -> None:
    bad = dm.Column("link", "LINK", default="javascript:alert(1)")
    rows = instance.create_row_table("t", [dm.Column("link", "LINK", default="https://a.org")])
    for call in (
        lambda: instance.create_row_table("other", [bad]),
        lambda: rows.change([dm.AddColumn(dm.Column("more", "ENTITY", enum=["no table"]))]),
        lambda: rows.change([dm.RetypeColumn("link", "LINK", default=bad.default)]),
    ):
        with pytest.raises(InvalidColumn, match=r"is no (link|reference)"):
            call()
    with instance._supplier.connection() as conn:  # a default that earlier releases accepted
        conn.execute(
            "update row_columns set columns = replace(columns::text, 'https://a.org', %s)::jsonb",
            [bad.default],
        )
    again = instance.row_table("t")
    again.change([dm.Insert([{"link": "https://b.org"}]), dm.AddColumn(dm.Column("n", "INTEGER"))])
    assert again.row(1)["link"] == "https://b.org"


def test_a_cell_refers_to_an_existing_table(instance: dm.Instance, tmp_path: Path) -> None:
    rows = instance.create_row_table("t", [dm.Column("of", "ENTITY"), dm.Column("text", "STRING", 100)])
    rows.change([dm.Insert([{"of": "t"}, {"of": "t:1"}, {"of": "t:1:1"}, {"text": "none"}])])
    path = tmp_path / "rows.csv"
    path.write_text("of\nt\nnone:7\n")
    calls: list[Callable[[], object]] = [
        lambda: rows.change([dm.Insert([{"of": "t"}, {"of": "none:7"}])]),
        lambda: rows.change([dm.Insert([{"of": "t"}, {"of": "none:7"}])], dry_run=True),
        lambda: rows.upload_csv(path),
        lambda: rows.upsert([{"of": "t", "text": "new"}, {"of": "none:7", "text": "other"}], on=["text"]),
    ]
    for call in calls:
        with pytest.raises(InvalidRow, match=r"column 'of' .*'none:7' refers to a table that does not exist"):
            call()
    with pytest.raises(
        (InvalidColumn, InvalidRow), match=r"'text'.*'none' refers to a table that does not exist"
    ):
        rows.change([dm.RetypeColumn("text", "ENTITY")])
    assert rows.version() == 1


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("ENTITY", "none:7", "refers to a table that does not exist"),
        ("FILE", f"file:{'0' * 32}:0:{'0' * 64}:a.jpg", "refers to a file that was not put into this table"),
    ],
)
def test_a_retype_checks_rows_that_the_same_transaction_changes(
    instance: dm.Instance, kind: ColumnType, text: str, why: str
) -> None:
    rows = instance.create_row_table("t", [dm.Column("text", "STRING", 200), dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"text": text, "n": 1}, {"n": 2}])])
    retype = dm.RetypeColumn("text", kind)
    for changes in (
        [dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "n": 5}]), retype],
        [retype, dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "n": 5}])],
        [dm.Patch([{"ROW_ID": 2, "ROW_VERSION": 1, "text": text}]), retype],
        [dm.Insert([{"text": text}]), dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "text": None}]), retype],
        [retype, dm.Insert([{"text": text}]), dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "text": None}])],
    ):
        for dry_run in (False, True):
            with pytest.raises((InvalidRow, InvalidColumn), match=why) as error:
                rows.change(changes, dry_run=dry_run)
            assert text in str(error.value)
            assert len(str(error.value).splitlines()) == 1
    assert rows.version() == 1
    # deleted rows and emptied cells refer to nothing, so that they are not checked
    rows.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "text": None}]), retype])
    assert rows.columns()[0].type == kind


def test_damage_is_reported_and_leaves_no_file(
    instance: dm.Instance, rows: RowTable, photo: Path, tmp_path: Path
) -> None:
    rows.change([dm.Insert([{"photo": rows.put_file(photo)}])])
    path = instance.objects.local_path(objects_of(instance)[0])
    assert path is not None
    path.write_bytes(BYTES[:-1] + b"x")
    with pytest.raises(
        ObjectDamaged, match=r"^table 'samples': object .* is not the file that was put there"
    ):
        rows.save_file(1, "photo", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    path.write_bytes(BYTES + BYTES)
    read: list[bytes] = []
    with pytest.raises(ObjectDamaged):
        read.extend(rows.files.chunks(rows.file(1, "photo")))
    assert sum(map(len, read)) < len(BYTES)


def test_a_damaged_file_ends_early_over_http(
    instance: dm.Instance, rows: RowTable, photo: Path, tmp_path: Path
) -> None:
    """A client would accept an answer of full length as the file. For a lost file, the client does
    not retry.
    """
    rows.change([dm.Insert([{"photo": rows.put_file(photo)}])])
    path = instance.objects.local_path(objects_of(instance)[0])
    assert path is not None
    with serving(instance) as url, connect(url) as client:
        for damaged in (BYTES[:-1] + b"x", BYTES + BYTES, BYTES[:-1]):
            path.write_bytes(damaged)
            with pytest.raises(InstanceError, match="broke"):
                client.row_table("samples").save_file(1, "photo", tmp_path / "saved")
        path.unlink()
        with pytest.raises(RowNotFound, match="'photo' of row 1 is lost"):
            client.row_table("samples").save_file(1, "photo", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_part_of_a_file_is_checked_with_all_of_it(
    instance: dm.Instance, rows: RowTable, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo.write_bytes(b"0123456789")
    rows.change([dm.Insert([{"photo": rows.put_file(photo)}])])
    monkeypatch.setattr(cell_files, "CHUNK_BYTES", 3)
    file = rows.file(1, "photo")
    parts = [(start, end) for start in range(11) for end in range(start, 11)]
    for start, end in parts:
        assert b"".join(rows.files.chunks(file, start, end)) == b"0123456789"[start:end]
    assert b"".join(rows.files.chunks(file)) == b"0123456789"
    [name] = objects_of(instance)
    Path(instance.objects.url.removeprefix("file://"), name).write_bytes(b"012345678X")
    for start, end in parts:
        found = bytearray()
        if start < end:
            with pytest.raises(ObjectDamaged):
                for chunk in rows.files.chunks(file, start, end):
                    found += chunk
            assert len(found) < end - start


def test_files_are_no_orphans_are_backed_up_and_are_dropped_with_their_table(
    instance: dm.Instance, rows: RowTable, photo: Path, dsn: str, tmp_path: Path
) -> None:
    rows.change([dm.Insert([{"photo": rows.put_file(photo)}])])
    assert instance.check(deep=True).problems == ()
    assert list(instance.orphans(older_than=timedelta(0))) == []
    assert len(objects_of(instance)) == 1
    instance.drop_table("samples")
    assert objects_of(instance) == []


@pytest.mark.slow
def test_files_over_http(instance: dm.Instance, rows: RowTable, photo: Path, tmp_path: Path) -> None:
    with serving(instance, job_threads=1) as url, connect(url) as client:
        remote = client.row_table("samples")
        remote.change([dm.Insert([{"photo": remote.put_file(photo)}, {}])])
        assert remote.save_file(1, "photo", tmp_path / "saved").read_bytes() == BYTES
        assert rows.file(1, "photo").name == "Föto 1.jpg"
        with pytest.raises(RowNotFound, match="has no file"):
            remote.save_file(2, "photo", tmp_path / "none")
        with pytest.raises(InvalidName):
            remote.put_file(photo, "a/b")
    assert not (tmp_path / "none").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["object_missing", "object_size", "object_digest"])
def test_a_check_reports_lost_files(instance: dm.Instance, rows: RowTable, photo: Path, how: str) -> None:
    rows.change([dm.Insert([{"photo": rows.put_file(photo)} for _ in range(2)])])
    lost = objects_of(instance)[0]
    instance.objects.delete([lost])
    if how != "object_missing":
        instance.objects.put(lost, BYTES[:-1] + (b"x" if how == "object_digest" else b""))
    for deep in (False, True):
        found = [(one.kind, one.table, one.filename) for one in instance.check(deep=deep).problems]
        assert found == ([(how, "samples", lost)] if deep or how != "object_digest" else [])
    instance.drop_table("samples")
    assert instance.check().problems == ()


@pytest.mark.slow
def test_a_backup_has_files_as_they_were_put(tmp_path: Path, photo: Path) -> None:
    place = tmp_path / "backups"
    with dm.local(tmp_path / "lake") as instance:
        rows = instance.create_row_table("samples", COLUMNS)
        rows.change([dm.Insert([{"photo": rows.put_file(photo)} for _ in range(2)])])
        first = instance.backup(place)
        gone, short = objects_of(instance)
        instance.objects.delete([gone, short])
        instance.objects.put(short, b"short")
        with pytest.raises(BackupDamaged, match="row_files/"):
            instance.backup(place)
        again = instance.backup(place, since=first.name)
        partial = instance.backup(place, despite_damage=True)
    assert {one.name for one in partial.damaged} == {gone, short}
    for name in (gone, short):
        assert (place / again.name / "objects" / name).read_bytes() == BYTES
    lost = dm.restore(place, tmp_path / "rescued", backup=partial.name, despite_damage=True).lost
    assert {(one.table, one.filename) for one in lost} == {("samples", gone), ("samples", short)}
