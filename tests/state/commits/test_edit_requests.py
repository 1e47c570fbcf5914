"""Requests that edit several tables: applied whole and once, beside the requests of single tables."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import dormouse as dm
from dormouse.errors import InvalidCommitRequest, TableNotFound
from dormouse.state.commits import apply
from dormouse.state.files import edits
from tests.commits import add, drained, files_of, send_raw, states
from tests.stored import at_once, file, query, ref, wait_until
from tests.support.api import Instance
from tests.support.commits import AddFiles, CommitRequest, EditTables, Envelope, TableEdit, Tables, encode
from tests.support.state import LAYOUTS, KeyBounds, NewDeletion, Read, RowsContent

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
ONE = (1 + (1 << 63)).to_bytes(8, "big")
"""The encoded key 1."""
ALL_KEYS = [(b"", b"")]
"""The span of all keys."""


@pytest.fixture(autouse=True)
def tables(instance: Instance) -> None:
    """Makes the tables `t` and `u`."""
    for name in "tu":
        instance.create_table(name, SCHEMA)


def part(table: str, *names: str, **more: Any) -> TableEdit:
    files = tuple(file(name, ref(name), min_key=b"a", max_key=b"b") for name in names)
    return TableEdit(table=table, files=files, **more)


def edit(commit_id: str, *parts: TableEdit) -> EditTables:
    return EditTables(commit_id=commit_id, parts=parts)


def deletion(condition: str = '{"k": 1}', *bounds: Any, rows: RowsContent | None = None) -> NewDeletion:
    return NewDeletion(condition, KeyBounds(*bounds), by_values=False, rows=rows)


def moment(instance: Instance) -> str:
    return str(query(instance._supplier, "select pg_current_snapshot()::text")[0][0])


def reading(instance: Instance) -> dict[str, Any]:
    return {"reads": (Read(moment(instance), ALL_KEYS),)}


def conditions(instance: Instance, table: str) -> list[str]:
    return [one.condition for one in instance.table(table).context.deletions.list()]


def test_an_edit_is_applied_whole(instance: Instance) -> None:
    request = edit("e", part("t", "a", deletions=(deletion(),)), part("u", "b", "c"))
    assert states(drained(instance, request)) == {"e": "applied"}
    assert (files_of(instance), files_of(instance, "u")) == (["a"], ["b", "c"])
    assert (conditions(instance, "t"), conditions(instance, "u")) == (['{"k": 1}'], [])
    assert instance.commit_status("e").state == "applied"
    assert states(drained(instance, request)) == {"e": "applied_before"}
    assert len(conditions(instance, "t")) == 1


def test_an_edit_is_applied_at_once(instance: Instance) -> None:
    request = edit("e", part("t", "a"), part("u", "b"))
    added = add("t", "z")
    assert [(s.commit_id, s.state) for s in instance.commit([added, request])] == [
        ("add z", "applied"),
        ("e", "applied"),
    ]
    assert [s.state for s in instance.commit([request])] == ["applied"]
    assert (files_of(instance), files_of(instance, "u")) == (["a", "z"], ["b"])


def test_edits_and_other_requests_share_a_batch(instance: Instance) -> None:
    """The batch has edits in both orders of the tables, repeated ids, and one that fails."""
    requests: list[CommitRequest] = [
        edit("e1", part("t", "a"), part("u", "b", deletions=(deletion(),))),
        add("t", "c"),
        edit("e2", part("u", "d", deletions=(deletion(),)), part("t", "e")),
        edit("e1", part("t", "f"), part("u", "g")),
        add("u", "h", "e3"),
        edit("bad", part("u", "i"), part("t", "c")),
    ]
    instance.submit(requests)
    committer = instance.committer(concurrency=1)
    outcomes = [(o.commit_id, o.state, o.error_class) for o in committer.drain()]
    assert committer.metrics().batches == 1
    assert sorted(outcomes, key=str) == [
        ("add c", "applied", None),
        ("bad", "rejected", "FileAlreadyExists"),
        ("e1", "applied", None),
        ("e1", "applied_before", None),
        ("e2", "applied", None),
        ("e3", "applied", None),
    ]
    assert files_of(instance) == ["a", "c", "e"]
    assert files_of(instance, "u") == ["b", "d", "h"]


@pytest.mark.parametrize("what", ["file", "deletion", "restore"])
def test_a_disturbed_edit_changes_nothing(instance: Instance, what: str) -> None:
    table = instance.table("u")
    table.history.record_cut("before")
    request = edit("e", part("t", "a"), part("u", "b", **reading(instance)))
    if what == "file":
        drained(instance, add("u", "x"))
    elif what == "deletion":
        table.delete({"k": 1})
    else:
        table.ingest([{"k": 1, "v": 1}])
        request = edit("e", part("t", "a"), part("u", "b", **reading(instance)))
        table.restore("before")
    outcome = drained(instance, request)["e"]
    assert (outcome.state, outcome.error_class) == ("rejected", "EditConflict")
    assert "table 'u': other commits may have changed rows that the edit read" in str(outcome.error)
    assert files_of(instance) == [] and "b" not in files_of(instance, "u")
    assert instance.commit_status("e").state == "rejected"
    later = edit("e", part("t", "a"), part("u", "b", **reading(instance)))
    assert states(drained(instance, later)) == {"e": "applied"}
    assert instance.commit_status("e").error is None


def test_a_compaction_of_read_files_disturbs_no_edit(instance: Instance) -> None:
    table = instance.table("t")
    for k in (1, 2):
        table.ingest([{"k": k, "v": k}])
    request = edit("e", part("t", "a", **reading(instance)), part("u", "b"))
    table.compact(full=True)
    assert states(drained(instance, request)) == {"e": "applied"}


def test_an_edit_of_a_table_that_is_gone_changes_nothing(instance: Instance) -> None:
    request = edit("e", part("t", "a"), part("u", "b"))
    instance.submit([request])
    instance.drop_table("u")
    [outcome] = instance.committer().drain()
    assert (outcome.state, outcome.error_class) == ("rejected", "TableNotFound")
    assert files_of(instance) == []
    with pytest.raises(TableNotFound, match="table 'u' does not exist"):
        instance.submit([request])
    with pytest.raises(TableNotFound, match="table 'u' does not exist"):
        instance.commit([request])


def test_an_edit_of_another_timeline_changes_nothing_and_is_kept(instance: Instance) -> None:
    records = {name: instance.table(name).context.table for name in "tu"}
    request = edit("e", part("t", "a"), part("u", "b")).addressed(records)
    theirs = json.loads(encode(request))
    theirs["parts"][1]["table_uuid"] = uuid4().hex
    send_raw(instance, json.dumps(theirs, separators=(",", ":")))
    [outcome] = instance.committer().drain()
    assert (outcome.state, outcome.error_class) == ("rejected", "TableOfAnotherTimeline")
    assert files_of(instance) == []
    assert len(instance.commits.dead_letters(10)) == 1


def test_renamed_tables_are_found_by_their_ids(instance: Instance) -> None:
    instance.submit([edit("e", part("t", "a"), part("u", "b"))])
    instance.rename_table("u", "other")
    instance.create_table("u", SCHEMA)
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    assert (files_of(instance, "other"), files_of(instance, "u")) == (["b"], [])


def test_an_edit_of_an_abandoned_attempt_changes_nothing(instance: Instance) -> None:
    context = instance.table("u").context
    kept, lost = (context.attempts.begin(context.table) for _ in range(2))
    context.attempts.abandon(lost)
    ids = (kept.attempt_id, lost.attempt_id)
    outcome = drained(instance, edit("e", part("t", "a"), part("u", "b", attempt_ids=ids)))["e"]
    assert (outcome.state, outcome.error_class) == ("rejected", "AttemptAbandoned")
    assert files_of(instance) == files_of(instance, "u") == []
    drained(instance, edit("f", part("t", "a"), part("u", "b", attempt_ids=ids[:1])))
    assert not context.attempts.abandon(kept), "the commit ended it"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_that_gets_another_layout_meanwhile_is_followed(instance: Instance, layout: str) -> None:
    """The committer knows the second table of the edit with its earlier layout."""
    tables = Tables(instance._supplier)
    known = tables.named({(None, "t"), (None, "u")})
    stores = [known[None, name].store for name in "tu"]
    instance.table("u").convert_layout(layout)
    names = [file(name, ref(name)) for name in "ab"]
    parts = [edits.Part(stores[0], names[:1]), edits.Part(stores[1], names[1:], [deletion()])]
    assert edits.commit(instance._supplier, parts, "e", lock_seconds_max=5)
    assert (files_of(instance), files_of(instance, "u")) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("more", "error_class"),
    [
        ({"deletions": (deletion("{"),)}, "InvalidInput"),
        ({"deletions": (deletion("[]"),)}, "InvalidInput"),
        ({"deletions": (deletion('{"nothing": 1}'),)}, "InvalidQuery"),
        ({"deletions": (deletion('{"k": 1}', [b"a"], [b"b"]),)}, "InvalidInput"),
        ({"deletions": (deletion('{"k": 1}', [None] * 2, [None] * 2),)}, "InvalidInput"),
        ({"deletions": (deletion(),), "schema_version": 2}, "SchemaMoved"),
        ({"deletions": (deletion(rows=RowsContent("x", b"")),)}, "InvalidInput"),
        (
            {"deletions": (deletion('{"__rows": {"columns": ["k"], "count": 1, "content": "x"}}'),)},
            "InvalidInput",
        ),
        ({"deletions": (deletion('{"__rows": {"rows": 1}}'),)}, "InvalidInput"),
        ({"deletions": (deletion(rows=RowsContent("owner/1.json", b"")),)}, "InvalidName"),
    ],
)
def test_a_deletion_that_does_not_fit_is_refused(
    instance: Instance, more: dict[str, Any], error_class: str
) -> None:
    outcome = drained(instance, edit("e", part("t", "a"), part("u", "b", **more)))["e"]
    assert (outcome.state, outcome.error_class) == ("rejected", error_class)
    assert files_of(instance) == files_of(instance, "u") == []


def test_a_deletion_for_columns_that_were_added_meanwhile_is_refused(instance: Instance) -> None:
    """The committer has the table of before in its cache."""
    tables = Tables(instance._supplier)
    request = edit("e", part("t", "a", deletions=(deletion(),), schema_version=1), part("u", "b"))
    records = {name: instance.table(name).context.table for name in "tu"}
    envelope = Envelope(request.addressed(records))
    tables.named((record.table_id, name) for name, record in records.items())
    instance.table("t").add_column(dm.Field("w", dm.LONG, nullable=True))
    [outcome] = apply.apply(tables, [envelope])
    assert (outcome.state, outcome.error_class) == ("rejected", "SchemaMoved")
    newer = edit("e", part("t", "a", deletions=(deletion(),), schema_version=2), part("u", "b"))
    [outcome] = apply.apply(tables, [Envelope(newer.addressed(records))])
    assert outcome.state == "applied", "the newer version is noticed at once"


def test_a_table_by_its_id_and_by_its_name_is_one_table(instance: Instance) -> None:
    known = part("old name", "a", table_id=instance.table("t").context.table.table_id)
    send_raw(instance, encode(edit("e", known, part("t", "b"))))
    [outcome] = instance.committer().drain()
    assert (outcome.state, outcome.error_class) == ("rejected", "InvalidInput")
    assert "each table must be in one part only" in str(outcome.error)
    assert files_of(instance) == []


def test_a_row_table_takes_no_edits(instance: Instance) -> None:
    instance.create_row_table("rows", [dm.Column("v", "STRING")])
    outcome = drained(instance, edit("e", part("t", "a"), part("rows", "b")))["e"]
    assert (outcome.state, outcome.error_class) == ("rejected", "NotARowTable")
    assert files_of(instance) == []


def test_an_edit_that_waits_for_a_lock_holds_up_no_other_request(
    instance: Instance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "EDIT_LOCK_SECONDS_MAX", 0.1)
    record = instance.table("t").context.table
    with psycopg.connect(dsn) as holder:
        holder.execute(f"lock table dormouse.file_reference_{record.table_id} in row exclusive mode")
        busy = [edit(f"e{n}", part("u", f"u{n}"), part("t", deletions=(deletion(),))) for n in range(30)]
        instance.submit([*busy, add("u", "x"), add("t", "y"), edit("free", part("u", "z"))])
        committer = instance.committer(concurrency=1)
        thread = threading.Thread(target=committer.run)
        thread.start()
        wait_until(lambda: committer.metrics().try_later >= 30)
        assert instance.commit_status("free").state == "applied"
        assert (files_of(instance), files_of(instance, "u")) == (["y"], ["x", "z"])
        assert {instance.commit_status(f"e{n}").state for n in range(30)} == {"pending"}
        again = apply.apply(Tables(instance._supplier), [Envelope(each) for each in busy[:2]])
        assert [(o.state, o.waits, o.error_class) for o in again] == [("try_later", True, "TableBusy")] * 2
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    wait_until(lambda: committer.metrics().applied == 33)
    committer.close()
    thread.join(60)
    assert len(files_of(instance, "u")) == 32


def test_edits_in_both_orders_of_tables_do_not_deadlock(instance: Instance) -> None:
    """Four committers apply them at once, beside requests of single tables."""
    at = moment(instance)
    far = (Read(at, [(b"\xff" * 9, b"\xff" * 9)]),)
    requests: list[CommitRequest] = []
    for n in range(40):
        names = "tu" if n % 2 else "ut"
        gone = {"deletions": (deletion('{"k": 1}', [ONE], [ONE]),)} if n % 5 == 0 else {"reads": far}
        requests += [
            edit(f"e{n}", part(names[0], f"{n}a", **gone), part(names[1], f"{n}b", reads=far)),
            AddFiles(commit_id=f"a{n}", table=names[0], files=part("t", f"{n}c").files),
        ]
    apart = [(Envelope(request) for request in requests[n::4]) for n in range(4)]
    suppliers = Tables(instance._supplier)
    answers = at_once(*(lambda some=list(some): apply.apply(suppliers, some) for some in apart))
    outcomes = [outcome for answer in answers for outcome in answer]
    left = [o for o in outcomes if o.state == "try_later"]
    assert {o.state for o in outcomes} <= {"applied", "try_later"} and all(o.waits for o in left)
    assert not [o for o in left if "deadlock" in str(o.error)]
    assert "applied" in states(drained(instance, *requests)).values() or not left
    names = [*files_of(instance), *files_of(instance, "u")]
    assert sorted(names) == sorted(f"{n}{letter}" for n in range(40) for letter in "abc")


DIES = """
import os, signal
import dormouse as dm
from dormouse.state.commits import handling

def die():
    os.kill(os.getpid(), signal.SIGKILL)

real = handling.settle
handling.settle = lambda *given: die() if {after} else real(*given)
from dormouse.state.files import edits
apply, calls = edits._apply, []

def applied(*given):
    calls.append(given)
    if len(calls) == 2 and not {after}:
        die()
    apply(*given)

edits._apply = applied
instance = dm.connect({dsn!r}, {objects!r})
instance.committer().drain()
"""


@pytest.mark.parametrize("after", [True, False], ids=["applied", "half applied"])
def test_a_committer_that_is_killed_applies_an_edit_once(
    instance: Instance, dsn: str, tmp_path: Path, after: bool
) -> None:
    instance.submit([edit("e", part("t", "a", deletions=(deletion(),)), part("u", "b"))])
    objects = (tmp_path / "objects").as_uri()
    program = DIES.format(after=after, dsn=dsn, objects=objects)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (files_of(instance), files_of(instance, "u")) == ((["a"], ["b"]) if after else ([], []))
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    [outcome] = instance.committer().drain()
    assert outcome.state == ("applied_before" if after else "applied")
    assert (files_of(instance), files_of(instance, "u")) == (["a"], ["b"])
    assert len(conditions(instance, "t")) == 1


def test_a_large_edit_travels_as_an_object(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"f{number:04}" for number in range(100)]
    monkeypatch.setattr(instance.commits.queues[0]._queue, "body_bytes_max", 1_000)
    instance.submit([edit("e", part("t", *names), part("u", "b"))])
    assert len(list(instance._objects.list("commits/"))) == 1
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    assert files_of(instance) == names and files_of(instance, "u") == ["b"]
    assert list(instance._objects.list("commits/")) == []


def test_one_request_is_no_list(instance: Instance) -> None:
    with pytest.raises(InvalidCommitRequest, match=r"write \[request\]"):
        instance.submit(edit("e", part("t", "a")))  # type: ignore[arg-type]
