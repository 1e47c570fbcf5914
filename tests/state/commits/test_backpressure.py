"""Backpressure: callers wait while the queue is long, see why, and go on when it has half its length."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import CommitQueueFull
from dormouse.state.commits import apply
from dormouse.state.commits.queue import AGE_MESSAGES_MIN, Gate, Marks, QueueDepth
from tests.commits import add
from tests.standard import OF_KEYS
from tests.stored import wait_until
from tests.support.api import Instance
from tests.support.objects import open_store
from tests.support.settings import load_settings

SCHEMA = OF_KEYS
MANY = 2 * AGE_MESSAGES_MIN


class Depths:
    """A fake queue that reports the given depths, one at each look. The last depth is repeated."""

    def __init__(self, *messages: int, approximate: bool = False, oldest_seconds: float = 0.0) -> None:
        self._found = [QueueDepth(number, oldest_seconds, approximate) for number in messages]
        self.looks = 0
        self.pauses = 0

    def __call__(self) -> QueueDepth:
        self.looks += 1
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]

    def gate(self, **marks: Any) -> Gate:
        def pause(seconds: float) -> None:
            self.pauses += 1

        return Gate(self, Marks(**{"messages_max": 100, **marks}), pause=pause)


def test_a_short_queue_is_looked_at_once() -> None:
    depths = Depths(100)
    depths.gate().wait()
    assert (depths.looks, depths.pauses) == (1, 0)


def test_above_the_high_mark_callers_wait_until_half_of_it_and_see_why() -> None:
    depths, messages = Depths(101, 100, 60, 51, 50), list[str]()
    depths.gate().wait(messages.append)
    assert depths.looks == 5
    assert len(messages) == 1
    assert "has 101 messages" in messages[0] and "below 50 messages" in messages[0]


def test_many_old_messages_make_callers_wait_and_one_old_message_does_not() -> None:
    def full(messages: int) -> bool:
        depths = Depths(messages, oldest_seconds=61)
        try:
            depths.gate(messages_max=1_000, age_seconds_max=60, wait_seconds_max=0).wait()
        except CommitQueueFull:
            return True
        return False

    assert (full(MANY), full(1)) == (True, False), "a single old message is tried again, and no sign of load"


def test_approximate_depths_count_only_when_several_looks_agree() -> None:
    peak = Depths(500, 500, 90, approximate=True)
    peak.gate().wait()
    assert peak.looks == 3, "not three looks above the mark, so no sender waits"
    dip = Depths(500, 500, 500, 0, 500, 0, 0, 500, 0, 0, 0, approximate=True)
    dip.gate().wait()
    assert dip.looks == 11, "not before three looks below half of it"


def test_the_wait_is_bounded() -> None:
    with pytest.raises(CommitQueueFull, match=r"has 200 messages.*is a committer running\?"):
        Depths(200).gate(wait_seconds_max=0).wait()


@pytest.fixture
def small(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance with a high mark of 40 messages, which waits only a moment without a committer."""
    settings = load_settings(commit_queue_messages_max=40, commit_queue_wait_seconds_max=120)
    with Instance(dsn, open_store(tmp_path / "objects"), settings).open() as instance:
        instance.create_table("t", SCHEMA)
        yield instance


@pytest.mark.slow
def test_compaction_split_and_collection_wait_for_the_queue(small: Instance) -> None:
    table = small.table("t")
    queue = small.commits.queues[0]
    for work in (table.compact, table.split, table.collect_garbage):
        queue.send(["x"] * 41)
        waits, ended = threading.Event(), threading.Event()

        def run(work: Any = work, waits: Any = waits, ended: Any = ended) -> None:
            work(waiting=lambda reason: waits.set())
            ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert waits.wait(60)
        assert not ended.is_set()
        small.committer().drain()
        assert ended.wait(60)
        thread.join()


def test_a_full_queue_refuses_at_last(dsn: str, tmp_path: Path) -> None:
    settings = load_settings(commit_queue_messages_max=2, commit_queue_wait_seconds_max=0)
    with Instance(dsn, open_store(tmp_path / "objects"), settings).open() as instance:
        instance.create_table("t", SCHEMA)
        instance.submit([add("t", "a"), add("t", "b"), add("t", "c")])
        with pytest.raises(CommitQueueFull, match="3 messages"):
            instance.submit([add("t", "d")])
        assert len(instance.committer().drain()) == 3
        instance.submit([add("t", "d")])


@pytest.mark.slow
def test_runaway_producers_against_a_slow_committer_keep_the_queue_bounded(
    small: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue exceeds the high mark by at most one batch for each producer, and nothing is lost."""
    producers, batches, batch = 4, 12, 10
    deepest, full, done = [0], threading.Event(), threading.Event()
    real = apply._TableBatch.apply

    def slow(self: Any, requests: Any) -> Any:
        threading.Event().wait(0.02)
        return real(self, requests)

    def produce(number: int) -> None:
        for item in range(batches):
            requests = [add("t", f"{number} {item} {n}") for n in range(batch)]
            small.submit(requests, waiting=lambda reason: full.set())

    def watch() -> None:
        while not done.wait(0.005):
            deepest[0] = max(deepest[0], small.commits.depths()[0].messages)

    monkeypatch.setattr(apply._TableBatch, "apply", slow)
    stop = threading.Event()
    committer = small.committer(concurrency=1, batch_max=20)
    threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    assert full.wait(60)
    committing = threading.Thread(target=committer.run, args=(stop,))
    committing.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a producer hangs"
    wait_until(lambda: small.commits.depths()[0].messages == 0, seconds_max=60)
    stop.set()
    done.set()
    for thread in (committing, watcher):
        thread.join(60)
    assert committer.metrics().applied == producers * batches * batch
    assert 0 < deepest[0] <= 40 + producers * batch


@pytest.mark.parametrize("how", ["submit", "collect"])
def test_an_instances_own_committer_makes_room_in_a_queue_that_was_full_before(
    dsn: str, tmp_path: Path, how: str
) -> None:
    settings = load_settings(commit_queue_messages_max=2, commit_queue_wait_seconds_max=30)
    objects = open_store(tmp_path / "objects")
    with Instance(dsn, objects, settings).open() as instance:
        instance.create_table("t", SCHEMA)
        instance.submit([add("t", name) for name in "abc"])
    with Instance(dsn, objects, settings, committer=True).open() as instance:
        if how == "submit":
            instance.submit([add("t", "d")])
        else:
            instance.table("t").collect_garbage()
        assert [one.state for one in instance.wait_for_commits(["add c"], seconds_max=30)] == ["applied"]
