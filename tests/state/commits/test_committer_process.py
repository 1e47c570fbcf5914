"""Committer processes lose nothing if they are killed, and finish their batches if they are stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commits import add, compaction
from tests.stored import live, query, wait_until
from tests.support.api import Instance

pytestmark = pytest.mark.usefixtures("table_t")

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
SECONDS_MAX = 120
IGNORING = ["sh", "-c", 'trap \'\' INT; exec "$0" "$@"']
ROUNDS, PRODUCERS, COMPACTIONS = 2, 2, 50
APPLIED = "select count(*) from applied_commit"


@contextmanager
def committer(
    dsn: str, tmp_path: Path, *options: str, ignored: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Yields a committer process that has reported that it runs. With `ignored`, it ignores SIGINT."""
    command = [DORMOUSE, "committer", "--batch", "20", *options]
    command += ["--dsn", dsn, "--objects", (tmp_path / "objects").as_uri()]
    command = [*IGNORING, *command] if ignored else command
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "the committer runs" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def applied(instance: Instance) -> int:
    return int(query(instance._supplier, APPLIED)[0][0])


def produce(instance: Instance, producer: int) -> None:
    first = producer * COMPACTIONS
    for number in range(first, first + COMPACTIONS):
        instance.submit(compaction("t", number))


@pytest.mark.slow
def test_killed_committers_lose_nothing_and_apply_everything_once(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    """Two committers at a time are killed while they serve two producers."""
    for round_number in range(ROUNDS):
        numbers = range(round_number * PRODUCERS, (round_number + 1) * PRODUCERS)
        producers = [threading.Thread(target=produce, args=(instance, number)) for number in numbers]
        with committer(dsn, tmp_path) as one, committer(dsn, tmp_path) as two:
            enough = applied(instance) + 50
            for thread in producers:
                thread.start()
            wait_until(lambda enough=enough: applied(instance) >= enough, SECONDS_MAX)
            one.send_signal(signal.SIGKILL)
            two.send_signal(signal.SIGKILL)
        for thread in producers:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()
    # as if the visibility timeout had passed
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    assert {outcome.state for outcome in instance.committer().drain()} <= {"applied", "applied_before"}
    total = ROUNDS * PRODUCERS * COMPACTIONS
    assert applied(instance) == 3 * total
    references = live(instance.table("t").files)
    assert sorted(name for _, name, _, _ in references) == sorted(f"new {n}" for n in range(total))
    assert sum(rows for _, _, rows, _ in references) == 100 * total
    assert query(instance._supplier, "select count(*) from rejected_commit") == [(0,)]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGTERM, False)]
)
def test_a_signal_stops_a_committer_in_order(
    instance: Instance, dsn: str, tmp_path: Path, number: int, ignored: bool
) -> None:
    """The committer finishes and acknowledges its current batch, and reports its work.

    A committer that was started with SIGINT ignored is not stopped by SIGINT.
    """
    with committer(dsn, tmp_path, "--json", ignored=ignored) as process:
        if ignored:
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        instance.submit([add("t", f"f{n}") for n in range(200)])
        wait_until(lambda: applied(instance) > 0, SECONDS_MAX)
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0
    assert all(line.startswith("dormouse: so far") for line in err.splitlines())
    done = json.loads(out)
    left = query(instance._supplier, "select count(*), coalesce(max(receive_count), 0) from commit_message")
    assert done["applied"] == applied(instance)
    assert left == [(200 - done["applied"], 0)], "what it took is acknowledged; what it did not take is whole"


@pytest.mark.slow
def test_the_command_line_drains_the_queue(instance: Instance, dsn: str, tmp_path: Path) -> None:
    instance.submit([*compaction("t", 1), add("t", "new 1", "late")])
    options = ["--dsn", dsn, "--objects", (tmp_path / "objects").as_uri(), "--json"]

    def run(*arguments: str) -> dict[str, object]:
        command = [DORMOUSE, *arguments, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS_MAX)
        assert done.stderr == ""
        return dict(json.loads(done.stdout))

    assert run("commit-status", "late") == {"commit_id": "late", "state": "pending", "error": None}
    drained = run("committer", "--drain")
    assert len(drained["outcomes"]) == 4  # type: ignore[arg-type]
    assert run("commit-status", "add old 1")["state"] == "applied"
    assert run("queue")["dead_letters"] == []
