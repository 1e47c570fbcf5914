"""Erasures: the erased rows are in no file, moment, object or version; everything else is unchanged."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.durability.erasing import EraseReport, _Erasing
from dormouse.errors import CutExpired, InvalidInput, InvalidQuery, JobFailed, ObjectNotFound, TableBusy
from dormouse.state.files.holds import held
from tests.support.api import Instance, Table
from tests.support.state import LAYOUTS, Erasure
from tests.support.writing import commit_files, open_source, write_leaves

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("who", dm.STRING), dm.Field("v", dm.LONG)])
GONE = "person 3"
PROPERTIES: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


def data(*keys: int, v: int = 0) -> pa.Table:
    return pa.table(
        {"k": list(keys), "who": [f"person {k % 7}" for k in keys], "v": [v] * len(keys)},
        schema=pa.schema(
            [
                pa.field("k", pa.int64(), nullable=False),
                pa.field("who", pa.string(), nullable=False),
                pa.field("v", pa.int64(), nullable=False),
            ]
        ),
    )


def made(instance: Instance, layout: str = "file_table", **properties: Any) -> Table:
    given = dm.TableProperties(**{**PROPERTIES, **properties})
    return instance.create_table("t", SCHEMA, layout=layout, split_points=[100], properties=given)


def people(table: Table, as_of: Any = None, where: Any = None) -> list[tuple[int, str]]:
    rows = table.query(where, ["k", "who"], as_of=as_of).read_all().to_pylist()
    return [(row["k"], row["who"]) for row in rows]


def on_disk(folder: Path) -> list[tuple[Path, str]]:
    """Returns every row of every Parquet file below a folder, with the file's path."""
    return [
        (path, row["who"])
        for path in folder.rglob("*.parquet")
        for row in pq.read_table(path, columns=["who"]).to_pylist()
    ]


def is_erased(folder: Path) -> bool:
    return GONE not in {who for _, who in on_disk(folder)}


def quick(table: Table, where: Any = None, **given: Any) -> EraseReport:
    return table.erase({"who": GONE} if where is None else where, **{"wait_seconds": 0.0, **given})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_erased_rows_are_in_no_file_and_no_moment_and_other_rows_stay(
    instance: Instance, tmp_path: Path, layout: str
) -> None:
    table = made(instance, layout)
    table.ingest(data(*range(20), 105))
    table.ingest(data(*range(50, 60), 106))
    cut = table.history.record_cut("before")
    table.compact()  # the inputs become history
    tried = table.erase({"who": GONE}, dry_run=True)
    assert (tried.deletion_id, tried.rows, tried.is_finished) == (None, 2 * 5, False), "in inputs and output"
    assert not table.deletions()
    expected = [one for one in people(table) if one[1] != GONE]
    report = quick(table)
    assert report.is_finished
    assert (report.deletion_id, report.rows, report.files, report.backups) == (1, tried.rows, tried.files, ())
    assert report.files_looked_at == tried.files_looked_at
    assert people(table) == expected
    assert is_erased(tmp_path), "the rows are not in history either"
    for moment in (cut, "before", cut.recorded_at):
        with pytest.raises(CutExpired, match=r"erased from .* \(deletion 1\)"):
            people(table, moment)
    assert people(table, cut, {"k": dm.Range(min=100)}) == [(105, "person 0"), (106, "person 1")]
    with pytest.raises(CutExpired, match="were erased from"):
        table.changes(after=cut).read_all()
    with pytest.raises(CutExpired, match="were erased from"):
        table.restore(to=cut)
    assert table.erasures() == [report]
    assert not instance.check(deep=True).problems
    table.collect_garbage()
    assert people(table) == expected
    table.ingest(data(3))
    assert (3, GONE) in people(table), "rows ingested later stay"


@pytest.mark.slow
def test_erase_covers_shared_files_and_unreferenced_rows(instance: Instance, tmp_path: Path) -> None:
    table = made(instance, split_threshold_rows=10, split_min_rows=2)
    table.ingest(data(*range(30)))
    while table.split().partitions_split:
        pass
    leaf = table.partitions.leaves()[0]
    table.context.jobs.create_of_shared([leaf.partition_id])
    from tests.support.writing import compact

    compact(table.context, create=False)
    expected = [one for one in people(table) if one[1] != GONE]
    report = quick(table, {"k": dm.Range(0, 5), "who": GONE})
    assert report.rows == 2, "in the leaf's own file, and in the one that the others still share"
    assert [k for k, who in people(table) if who == GONE] == [10, 17, 24]
    quick(table)
    assert people(table) == expected
    assert is_erased(tmp_path)


def test_erase_covers_rows_hidden_by_earlier_deletions(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(20)))
    before = table.history.record_cut("before")
    table.delete({"k": 3})
    table.delete({"who": GONE})
    report = quick(table)
    assert report.rows == 3, "rows deleted before are erased, too"
    assert is_erased(tmp_path)
    assert len(people(table)) == 17
    with pytest.raises(CutExpired):
        people(table, before)
    assert not table.deletions(), "no file needs any of them"


def test_compaction_jobs_of_erased_files_commit_nothing(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    table.ingest(data(*range(5, 10)))
    context = table.context
    context.jobs.create()
    [job] = context.jobs.take(1)  # as if taken by a process that was killed
    report = quick(table)
    assert report.is_finished
    assert is_erased(tmp_path)
    from tests.support.writing import run_compaction

    assert run_compaction(context, job, 0).outcome == "superseded"
    assert is_erased(tmp_path)
    assert len(people(table)) == 9


@pytest.mark.objects
@pytest.mark.slow
def test_an_earlier_writer_is_named_until_it_ends(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    context = table.context
    with context.attempts.attempt(context.table) as attempt:
        name = attempt.object_name("left")
        copied(table, tmp_path, name)
        report = quick(table)
        assert [attempt.attempt_id in one for one in report.open] == [True]
        assert not report.is_finished
        assert not is_erased(tmp_path)
    assert (tmp_path / "objects" / name).exists()
    again = quick(table)
    assert not again.is_finished, "the attempt ended, but its outcome is unknown"
    last = quick(table, abandon_writers=True)
    assert (last.files, last.rows, last.is_finished) == (1, 1, True), (
        "the last report includes the first one's rows"
    )
    assert is_erased(tmp_path)
    assert table.erasures() == [report, again, last]


def test_erase_waits_for_writers_after_it_deleted_the_files(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup that begins while the erasure waits for writers needs none of the deleted files."""
    table, gone = made(instance), list[bool]()
    table.ingest(data(*range(5)))
    monkeypatch.setattr(Erasure, "writers", lambda self: (gone.append(is_erased(tmp_path)), [])[1])
    assert (quick(table).is_finished, gone) == (True, [True])


@pytest.mark.objects
@pytest.mark.slow
def test_a_second_erasure_deletes_rows_committed_during_the_first(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    context = table.context
    with context.attempts.attempt(context.table) as attempt:
        source = open_source(data(3, 4), SCHEMA)
        files = write_leaves(context, attempt, source, lambda *_: None, 1 << 20)
        assert not quick(table).is_finished
        commit_files(context, attempt, files, "late")
    assert people(table)[-2:] == [(4, "person 4"), (4, "person 4")]
    assert (3, GONE) in people(table), "it was committed after the deletion"
    last = quick(table)
    assert (last.files, last.rows, last.is_finished) == (2, 2, True)
    assert GONE not in {who for _, who in people(table)}
    assert is_erased(tmp_path)


@pytest.mark.objects
@pytest.mark.slow
def test_erase_accepts_a_missing_object_only_of_a_collected_file(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    for _ in range(2):
        table.ingest(data(*range(5)))
    before = {file.filename for file in table.file_page()}
    table.compact()
    (tmp_path / "objects" / before.pop()).unlink()
    assert quick(table).is_finished
    assert is_erased(tmp_path)
    [merged] = {path for path, _ in on_disk(tmp_path)}
    merged.unlink()
    with pytest.raises(ObjectNotFound, match=merged.name):
        quick(table, {"who": "person 1"})


def copied(table: Table, folder: Path, name: str) -> None:
    """Copies a file of the table to an object with another name."""
    source = next(file.filename for file in table.file_page() if "left" not in file.filename)
    target = folder / "objects" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "objects" / source, target)


@pytest.mark.objects
@pytest.mark.slow
def test_erase_covers_objects_unknown_to_the_database(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    prefix = table.context.table.object_prefix
    copied(table, tmp_path, f"{prefix}0/{'a' * 32}/0-other.parquet")
    strange = tmp_path / "objects" / f"{prefix}0/{'b' * 32}/0-strange.parquet"
    strange.parent.mkdir(parents=True)
    strange.write_bytes(b"no Parquet")
    report = quick(table)
    assert (report.rows, report.files, report.objects_looked_at) == (2, 2, 2)
    assert [one.split(":")[0].endswith("strange.parquet") for one in report.unreadable] == [True]
    strange.unlink()
    assert is_erased(tmp_path)


@pytest.mark.slow
def test_erase_waits_for_consumers_and_reports_them(instance: Instance) -> None:
    table = made(instance)
    table.ingest(data(*range(10)))
    quicker, late = table.consumer("quick"), table.consumer("late")
    table.ingest(data(3))
    done = threading.Event()

    def read() -> None:
        while not table.deletions() and not done.wait(0.01):
            pass
        for consumer in (quicker,):
            rows = consumer.read().read_all().to_pylist()
            kinds.extend((row["_change"], row["k"]) for row in rows)
            consumer.acknowledge()

    kinds: list[tuple[str, int]] = []
    reader = threading.Thread(target=read)
    reader.start()
    try:
        report = table.erase({"who": GONE}, wait_seconds=3.0)
    finally:
        done.set()
        reader.join()
    assert report.consumers == ("late",)
    assert sorted(kinds) == [("delete", 3), ("delete", 3), ("insert", 3)]
    reported = {one.name: (one.is_expired, one.rows_behind) for one in table.consumers()}
    assert reported == {"late": (True, None), "quick": (False, 0)}
    assert table.status() is not None
    with pytest.raises(dm.errors.CutExpired, match="rows of that time were erased"):
        late.read()
    with pytest.raises(CutExpired, match="were erased from"):
        late.read().read_all()
    table.ingest(data(8))
    assert [row["k"] for row in quicker.read().read_all().to_pylist()] == [8]


@pytest.mark.slow
def test_retention_by_bytes_keeps_the_history_since_an_erasure(instance: Instance) -> None:
    table = made(instance)
    table.history.record_cut()
    table.ingest(data(*range(10)))
    quick(table)
    assert table.history.apply_retention(byte_count=1).truncated_at is None
    assert table.history.apply_retention(byte_count=0).truncated_at


def test_erase_does_not_damage_a_running_backup(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    with held(table.context.supplier, "backup 2026"), pytest.raises(TableBusy, match="'backup 2026"):
        quick(table)
    assert [who for _, who in people(table) if who == GONE] == []
    report = quick(table)
    assert (report.rows, report.is_finished) == (1, True)
    assert is_erased(tmp_path)


def test_a_file_that_cannot_be_merged_is_named(instance: Instance, tmp_path: Path) -> None:
    table = made(instance, compaction_attempts_max=1)
    table.ingest(data(*range(5)))
    [file] = table.file_page()
    digest = "update file set digest = gen_random_uuid()"
    with table.context.supplier.connection() as conn:
        conn.execute(digest)
    with pytest.raises(JobFailed, match=f"deleted but not erased.*{file.filename}"):
        quick(table)
    assert len(people(table)) == 4


def test_a_concurrent_restore_is_reported(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(instance)
    table.ingest(data(*range(5)))
    cut = table.history.record_cut()
    found = Erasure.referenced

    def restored(self: Erasure) -> tuple[int, int]:
        monkeypatch.undo()
        table.restore(to=cut)
        return found(self)

    monkeypatch.setattr(Erasure, "referenced", restored)
    with pytest.raises(TableBusy, match="was restored"):
        quick(table)
    assert len(people(table)) == 5
    assert quick(table).deletion_id == 2


def test_invalid_conditions_are_refused(instance: Instance) -> None:
    table = made(instance)
    table.ingest(data(1))
    with pytest.raises(InvalidQuery, match="is no condition"):
        table.erase({})
    with pytest.raises(InvalidQuery, match="unknown column"):
        table.erase({"whom": GONE})
    with pytest.raises(InvalidInput, match="engine"):
        table.erase({"who": GONE}, engine="stone")  # type: ignore[arg-type]
    assert not table.deletions()
    assert not table.erasures()


def test_an_open_query_completes_after_an_erasure(instance: Instance) -> None:
    table = made(instance)
    table.ingest(data(*range(5), *range(100, 2000)))
    reader = table.query({"k": dm.Range(min=104)})
    quick(table, {"k": dm.Range(0, 5), "who": GONE})
    assert sum(batch.num_rows for batch in reader) == 1896


def test_erase_deletes_every_row_of_a_key_of_a_keyed_table(instance: Instance, tmp_path: Path) -> None:
    """Older rows of the key and deletion marks are erased too. Erasing by values is refused."""
    table = made(instance, keep="newest_row")
    table.ingest(data(*range(20)))
    table.upsert(data(*range(2, 9), v=1))
    table.delete({"k": 9, "v": 0})
    with pytest.raises(InvalidQuery, match="which keeps one row per key: give conditions on row keys only"):
        quick(table)
    quick(table, {"k": [3, 9, 10, 17]})
    assert [k for k, _ in people(table)] == [k for k in range(20) if k not in {3, 9, 10, 17}]
    assert is_erased(tmp_path)
    table.upsert(data(3, v=2))
    assert people(table, where={"k": 3}) == [(3, GONE)]


def test_an_erasure_continues_after_its_deletion_was_retired(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector retires a deletion as soon as no file has its rows. The erasure must not think it was
    undone.
    """
    table = made(instance)
    table.ingest(data(*range(10)))
    look = _Erasing._look

    def stopped(self: Any) -> int:
        look(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Erasing, "_look", stopped)
        quick(table)

    def retired(self: Any) -> int:
        found = look(self)
        with table.context.supplier.connection() as conn:
            conn.execute(
                "update deletion set retired_xid = pg_current_xact_id(), retired_at = clock_timestamp() "
                "where deletion_id = 2 and retired_xid is null"
            )
        return found

    with monkeypatch.context() as patch:
        patch.setattr(_Erasing, "_look", retired)
        assert quick(table, {"who": "nobody"}).is_finished
    assert quick(table).is_finished
    assert people(table) == [(k, f"person {k % 7}") for k in range(10) if k != 3]
