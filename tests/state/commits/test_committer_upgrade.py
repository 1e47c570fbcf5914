"""A committer that runs during an upgrade leaves newer requests to a newer committer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import InstanceTooNew
from dormouse.state.commits import committer as committer_module
from tests.commits import add, assignment, compaction, files_of, send_raw, states
from tests.stored import query, wait_until
from tests.support.api import Instance
from tests.support.commits import Committer, encode
from tests.support.objects import open_store
from tests.support.settings import load_settings

pytestmark = pytest.mark.usefixtures("table_t")

NEWER: list[dict[str, Any]] = [{"version": 2}, {"type": "merge_partitions"}, {"colour": "red"}]


@pytest.mark.few(1)
@pytest.mark.parametrize("newer", NEWER)
def test_requests_of_a_newer_dormouse_are_left_to_a_newer_committer(
    instance: Instance, newer: dict[str, Any]
) -> None:
    """Requests that may need the result of a newer request stay in the queue too. Others are applied."""
    replaced, assigned, added = compaction("t", 1)
    body = encode(added)
    send_raw(instance, json.dumps({**json.loads(body), **newer}, separators=(",", ":")))
    instance.submit([replaced, assigned, add("t", "other")])
    outcomes = {o.commit_id: o for o in instance.committer(receives_max=2).drain()}
    assert states(outcomes) == {"add other": "applied", "add old 1": "try_later"}
    assert outcomes["add old 1"].error_class == "CommitRequestTooNew"
    assert instance.commits.dead_letters(10) == []
    sent = {id: instance.commit_status(id).state for id in ("add old 1", "assign job 1", "replace job 1")}
    assert set(sent.values()) == {"pending"}
    # to the newer committer the request is like any other
    query(instance._supplier, "update commit_message set body = %s where body like %s", body, "%add old 1%")
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    instance.committer().drain()
    assert files_of(instance) == ["new 1", "other"]


@pytest.mark.slow
def test_a_request_of_a_newer_dormouse_returns_to_the_queue_with_a_delay(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_raw(instance, encode(add("t", "a")).replace('"version":1', '"version":2'))
    instance.committer().drain()
    text = "select receive_count, extract(epoch from visible_at - clock_timestamp()) > 30 from commit_message"
    assert query(instance._supplier, text) == [(1, True)]
    monkeypatch.setattr(committer_module, "TOO_NEW_SECONDS", 0.05)
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    committer = instance.committer(receives_max=1)
    thread = threading.Thread(target=committer.run)
    thread.start()
    wait_until(lambda: committer.metrics().try_later >= 5)
    committer.close()
    thread.join()
    assert instance.commit_status("add a").state == "pending"


def migrated(instance: Instance, change: str) -> None:
    """Changes the schema as a newer Dormouse would."""
    query(instance._supplier, change)
    query(instance._supplier, "insert into migration (version, name, checksum) values (9999, 'newer', '')")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "alter table applied_commit rename column content to contents",
        "alter table applied_commit add column newer integer check (newer is not null)",
        "alter table commit_message rename column body to text",
    ],
)
def test_a_migration_ends_a_committer_and_nothing_is_rejected(instance: Instance, change: str) -> None:
    committer = instance.committer()
    instance.submit([add("t", "a"), assignment("t", "j", "a")])
    migrated(instance, change)
    with pytest.raises(InstanceTooNew, match="9999_newer"):
        committer.run()
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    with pytest.raises(InstanceTooNew, match="9999_newer"):
        instance.committer().drain()
    assert query(instance._supplier, "select count(*) from commit_message") == [(2,)]
    assert query(instance._supplier, "select count(*) from rejected_commit") == [(0,)]


def test_an_instances_committer_is_replaced_if_it_died_but_not_if_it_is_too_old(
    instance: Instance, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [InstanceTooNew("newer"), RuntimeError("no thread can be started")]
    begun: list[threading.Thread] = []

    def dies(self: Committer) -> None:
        begun.append(threading.current_thread())
        raise errors.pop()

    monkeypatch.setattr(Committer, "run", dies)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    objects = open_store(tmp_path / "objects")
    with Instance(dsn, objects, load_settings(), committer=True).open() as other:
        for number in range(4):
            other.submit([add("t", f"{number}")])
            begun[-1].join(60)
    assert len(begun) == 2
