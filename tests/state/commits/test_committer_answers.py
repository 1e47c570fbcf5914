"""The committer's answers, whatever happens between a commit and its answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.state.commits import apply, handling
from dormouse.state.commits.outcomes import commit_statuses
from tests.commits import add, compaction, drained, drained_while_one_is_held, replacement, send_raw, states
from tests.standard import OF_KEYS
from tests.stored import replace
from tests.support.api import Instance
from tests.support.commits import ReplaceFileReferences

pytestmark = pytest.mark.usefixtures("table_t")

SCHEMA = OF_KEYS


def test_the_errors_of_a_partly_applied_commit_are_kept_if_its_answer_is_lost(instance: Instance) -> None:
    """The committer dies between the commit and its answer, so the request is delivered again."""
    drained(instance, *compaction("t", 1)[1:])
    both = (replace("job 1", ["old 1"], "new 1"), replace("job 2", ["none"], "x"))
    request = ReplaceFileReferences(commit_id="both", table="t", requests=both)
    drained(instance, replacement("t", "job 2", ["none"], "x", "both"), receives_max=1)  # the first refusal
    tables = apply.Tables(instance._supplier)
    [lost] = apply.apply(tables, [apply.Envelope(request)])
    status = instance.commit_status("both")
    assert (status.state, status.error) == ("applied", lost.error)
    again = drained(instance, request)["both"]
    assert (again.state, again.error) == ("applied_before", lost.error)
    assert instance.commit_status("both") == status


def test_a_commit_id_sent_to_two_tables_is_applied_once_both_applied_it(instance: Instance) -> None:
    instance.create_table("u", SCHEMA)
    ids = [instance.table(name).files.table.table_id for name in ("t", "u")]
    drained(instance, add("t", "a", "both"))
    instance.submit([add("u", "b", "both")])
    assert instance.commit_status("both").state == "pending"
    statuses = commit_statuses(instance._supplier, ["both", "both"], 0, table_ids=ids)
    assert [status.state for status in statuses] == ["applied", "pending"]
    assert instance.commit([add("t", "a", "both")], seconds_max=0)[0].state == "applied"
    instance.committer().drain()
    assert instance.commit_status("both").state == "applied"
    statuses = commit_statuses(instance._supplier, ["both", "both"], 0, table_ids=ids)
    assert [status.state for status in statuses] == ["applied", "applied"]


def test_a_refusal_by_another_table_is_not_the_answer_of_a_commit_with_the_same_id(
    instance: Instance,
) -> None:
    instance.create_table("u", SCHEMA)
    t, u = (instance.table(name).files.table.table_id for name in ("t", "u"))
    drained(instance, add("t", "a", "both"), add("u", "b"))
    drained(instance, add("u", "b", "both"))
    statuses = commit_statuses(instance._supplier, ["both"] * 3, table_ids=[t, u, None])
    assert [(one.state, bool(one.error)) for one in statuses] == [
        ("applied", False),
        ("rejected", True),
        ("applied", True),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("table_id", [-1, 2**31, 2**64])
def test_a_pointer_without_object_or_table_becomes_a_dead_letter_and_harms_no_other(
    instance: Instance, table_id: int
) -> None:
    name = f"commits/{'0' * 32}-{'1' * 32}.json"
    about = f'"commit_id":"forged","table_id":{table_id},"object":"{name}"'
    send_raw(instance, f'{{"version":1,"type":"pointer",{about}}}')
    outcomes = drained(instance, add("t", "a"))
    assert states(outcomes) == {"forged": "rejected", "add a": "applied"}
    assert "no longer exists" in instance.commits.dead_letters(1)[0].reason


@pytest.mark.slow
def test_a_request_may_arrive_together_with_one_of_its_two_inputs(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement needs a file and a job. The file arrives with it; the assignment of the job later."""
    monkeypatch.setattr(handling, "PATIENCE_RECEIVES", 10_000)
    again = """update commit_message set visible_at = clock_timestamp()
               + case when body like '%%assign_job%%' then interval '2 s' else interval '0' end"""
    outcomes = drained_while_one_is_held(instance, again, receives_max=2, concurrency=1)
    assert [outcome.state for outcome in outcomes] == ["applied"] * 3


AHEAD = """
import datetime, sys, threading, time
import dormouse as dm
from dormouse.state.commits import committer, handling, postgres_queue, queue
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(minutes=5)
for module in committer, handling, postgres_queue, queue:
    module.datetime = Ahead
handling.PATIENCE_RECEIVES = 10_000
with dm.connect(*sys.argv[1:]) as instance:
    committer, stop = instance.committer(receives_max=2), threading.Event()
    thread = threading.Thread(target=committer.run, args=(stop,))
    thread.start()
    while committer.metrics().try_later < 4 and not committer.metrics().rejected:
        time.sleep(0.01)
    stop.set()
    thread.join()
    print(committer.metrics().rejected, (committer.metrics().latency_ms_p50 or 0) < 200_000)
"""


@pytest.mark.slow
def test_a_clock_that_is_ahead_rejects_nothing_early(instance: Instance, dsn: str, tmp_path: Path) -> None:
    instance.submit([replacement("t", "j", ["later"], "x"), add("t", "a")])
    command = [sys.executable, "-c", AHEAD, dsn, (tmp_path / "objects").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "True"], done.stderr
    assert instance.commit_status("replace j").state == "pending"
