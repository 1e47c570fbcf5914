"""Changes of row tables by processes that are killed or lose an answer: made completely or not, and once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import dormouse as dm
from dormouse.errors import CommitFailed, CommitIdReused, CommitOutcomeUnknown
from dormouse.rows.change import ChangeOptions, PreparedChanges, RowChanges
from dormouse.rows.changes import Changed
from dormouse.rows.reading import RowReader
from dormouse.rows.store import RowLocks, RowStore
from dormouse.writing import ingest as ingest_module
from tests.dying import dies_at
from tests.support.api import Instance
from tests.support.rows import RowTable
from tests.support.state import TableContext

LEASE_SECONDS = 0.2


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    made = instance.create_row_table("people", [dm.Column("n", "INTEGER"), dm.Column("s", "STRING")])
    made.change([dm.Insert([{"n": n} for n in range(4)])])
    return made


def change(own: TableContext, changes: Sequence[Any], change_id: str | None = None) -> Changed:
    """Makes a change over its own connections. Its lease is short, so that its lock is soon free if
    it dies.
    """
    store = RowStore(own.supplier, own.table)
    made = RowChanges(
        lambda: own, store, RowReader(lambda: own), RowLocks(own.supplier, own.table, LEASE_SECONDS)
    )
    return made.make(
        lambda held, columns: PreparedChanges(changes), ChangeOptions(change_id=change_id, wait_seconds=20)
    )


def seen(rows: RowTable) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows.current().read_all().to_pylist()]


def untracked(rows: RowTable) -> list[str]:
    """Returns the objects below the table's prefix that are neither its files nor their sketches."""
    context = rows.table.context
    tracked = {facts.filename for facts in context.store.page(None, 1_000)}
    names = (name for name, _ in context.objects.list(context.table.object_prefix))
    return sorted(name for name in names if name.removesuffix(".sketches") not in tracked)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["execute", "wait"])
def test_a_change_that_is_killed_anywhere_is_whole_or_nothing(
    rows: RowTable, at: Literal["execute", "wait"]
) -> None:
    """Some kills come between the upload of files and the commit. Another process continues after the
    lease.
    """
    context, left_objects, applied = rows.table.context, 0, 0
    for number in range(1, 90):
        before, version = seen(rows), rows.version()
        [(row_id, row_version, *_), *_] = before
        changes = [
            dm.Insert([{"n": number, "s": "new"}]),
            dm.Remove([(row_id, row_version)]),
            dm.AddColumn(dm.Column(f"c{number}", "DOUBLE", default=0.5)),
        ]
        died = dies_at(context, lambda own, changes=changes: change(own, changes), number, at)
        left_objects += bool(untracked(rows))
        if seen(rows) != before:
            applied += 1
            assert rows.version() == version + 3
            assert rows.history()[0].first_version == version + 1
            assert seen(rows)[-1][2:4] == (number, "new")
            assert {row[-1] for row in seen(rows)} == {0.5}
            assert [row[0] for row in seen(rows)] == [row[0] for row in before[1:]] + [before[-1][0] + 1]
        else:
            assert rows.version() == version
            assert len(rows.columns()) == 2 + applied
        if not died:
            break
    assert number > 8 and applied >= 1 and left_objects >= 1
    context.attempts.abandon_all()
    context.attempts.collect_abandoned(context.table.table_id)
    assert untracked(rows) == []
    assert rows.change([dm.Insert([{"n": 99}])], wait_seconds=20).changed["inserted"] == 1


def test_a_repeated_change_changes_nothing_and_returns_the_first_result(rows: RowTable) -> None:
    asked = [dm.Insert([{"n": 7}, {"n": 8}]), dm.Remove([(1, 1)])]
    done = rows.change(asked, change_id="job 1")
    again = rows.change(asked, change_id="job 1")
    assert (list(again.row_ids), again.versions, again.changed) == ([5, 6], [2, 3], done.changed)
    assert rows.version() == 3
    assert rows.change([dm.Insert([{"n": 9}])], change_id="job 2").row_ids == [7]


def test_a_change_id_with_another_change_is_refused(rows: RowTable, tmp_path: Path) -> None:
    """An accepted change would be lost silently, because its id counts as applied."""
    file = tmp_path / "rows.csv"
    file.write_text("n\n8\n", "utf-8")
    asked: dict[str, Any] = {
        "rows": [dm.Insert([{"n": 7, "s": "a"}]), dm.Remove([(1, 1)])],
        "columns": [dm.AddColumn(dm.Column("d", "DATE"))],
        "file": [dm.LoadCsv(file)],
    }
    for change_id, changes in asked.items():
        rows.change(changes, change_id=change_id)
    rows.upsert([{"n": 7, "s": "b"}], on=["n"], change_id="upsert")
    version = rows.version()
    same = [dm.Insert([{"s": "a", "n": 7}]), dm.Remove([(1, 1)])]
    assert rows.change(same, change_id="rows").changed["inserted"] == 1
    assert rows.upsert([{"n": 7, "s": "b"}], on=["n"], change_id="upsert").changed["updated"] == 1
    assert rows.change([dm.Insert(iter([{"n": 0}]))], change_id="rows").changed["deleted"] == 1
    others: list[tuple[str, list[Any]]] = [
        ("rows", [dm.Insert([{"n": 8, "s": "a"}]), dm.Remove([(1, 1)])]),
        ("rows", asked["rows"][:1]),
        ("columns", [dm.AddColumn(dm.Column("e", "DATE"))]),
        ("file", [dm.LoadCsv(file, header=False)]),
        ("upsert", asked["rows"]),
    ]
    for change_id, changes in others:
        with pytest.raises(CommitIdReused, match=f"change id '{change_id}' was used before"):
            rows.change(changes, change_id=change_id)
    with pytest.raises(CommitIdReused):
        rows.upsert([{"n": 7, "s": "c"}], on=["n"], change_id="upsert")
    file.write_text("n\n9\n", "utf-8")
    with pytest.raises(CommitIdReused):
        rows.change(asked["file"], change_id="file")
    file.unlink()
    assert rows.change(asked["file"], change_id="file").changed["inserted"] == 1
    assert rows.version() == version


def test_a_commit_whose_answer_is_lost_is_looked_up(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ingest_module._commit

    def lost(*args: Any, **options: Any) -> bool:
        commit(*args, **options)
        raise CommitOutcomeUnknown("the connection died")

    monkeypatch.setattr(ingest_module, "_commit", lost)
    assert rows.change([dm.Insert([{"n": 7}])]).row_ids == [5]
    assert len(seen(rows)) == 5
    assert rows.locks.holders() == []


def test_a_lost_commit_changes_nothing(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> bool:
        raise CommitOutcomeUnknown("the connection died")

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "_commit", lost)
        with pytest.raises(CommitFailed, match="lost the commit"):
            rows.change([dm.Insert([{"n": 7}])])
    assert len(seen(rows)) == 4
    assert untracked(rows) == []
    began = time.monotonic()
    assert rows.change([dm.Insert([{"n": 7}])]).row_ids == [5]
    assert time.monotonic() - began < 10, "its lock was given back"


@pytest.mark.parametrize(
    "changes",
    [
        [dm.Insert([{"n": 1}]), dm.Insert([{"n": "x"}])],
        [dm.Insert([{"n": 1}]), dm.Remove([(1, 1), (9, 1)])],
        [dm.Insert([{"s": "word"}]), dm.RetypeColumn("s", "INTEGER")],
        [dm.Insert([{"n": 1}]), dm.AddColumn(dm.Column("N", "STRING"))],
    ],
)
def test_a_change_that_is_refused_leaves_no_trace(rows: RowTable, changes: list[Any]) -> None:
    before = seen(rows)
    with pytest.raises((dm.errors.InvalidRow, dm.errors.InvalidColumn)):
        rows.change(changes)
    assert (seen(rows), rows.version(), untracked(rows)) == (before, 1, [])
    assert rows.locks.holders() == []
