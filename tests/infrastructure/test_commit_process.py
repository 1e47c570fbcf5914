"""The command of the commit service, as in its task definition, on queues of SQS and a real database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.assembly import Assembly
from tests.commits import compaction
from tests.standard import OF_KEYS
from tests.stored import live, query, wait_until
from tests.support.api import Instance, connect

QUEUES, TABLES, COMPACTIONS = 2, ("a", "b", "c"), 40
SECONDS_MAX = 120
APPLIED = "select count(*) from applied_commit"
NewQueue = Callable[..., str]


@pytest.fixture
def queues(new_sqs_queue: NewQueue) -> list[str]:
    return [new_sqs_queue() for _ in range(QUEUES)]


@pytest.fixture
def environment(sqs_options: dict[str, str], queues: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variables of the container."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs_options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", sqs_options["region_name"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", sqs_options["aws_access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", sqs_options["aws_secret_access_key"])
    monkeypatch.setenv("DORMOUSE_COMMIT_QUEUE", ",".join(queues))
    monkeypatch.setenv("DORMOUSE_QUEUES", str(QUEUES))


@pytest.fixture
def instance(dsn: str, tmp_path: Path, environment: None) -> Iterator[Instance]:
    with connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        for name in TABLES:
            instance.create_table(name, OF_KEYS)
        yield instance


@pytest.fixture
def words(synthesized: Callable[[str], Assembly], tmp_path: Path) -> list[str]:
    """Returns the command in the task definition; only the folder of its file is another."""
    from stacks.commit import ALIVE

    [found] = [
        one.properties["ContainerDefinitions"][0]["Command"]
        for one in synthesized("served").resources("AWS::ECS::TaskDefinition")
        if one.stack == "commit"
    ]
    return [word.replace(ALIVE, str(tmp_path / "alive")) for word in found]


@contextmanager
def service(words: list[str], dsn: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process of the service that commits and maintains."""
    variables = {"DORMOUSE_DSN": dsn, "DORMOUSE_OBJECTS": (tmp_path / "objects").as_uri()}
    dormouse = str(Path(sys.executable).with_name("dormouse"))
    with subprocess.Popen(
        [dormouse, *words], env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline() for _ in range(2)]
            assert [one for one in lines if "the committer runs" in one], lines
            assert [one for one in lines if "tables are maintained" in one], lines
            yield process
        finally:
            process.kill()


def beside(process: subprocess.Popen[str]) -> psutil.Process:
    """Returns the process of maintenance."""
    [found] = [one for one in psutil.Process(process.pid).children() if "maintain" in one.cmdline()]
    return found


def submit(instance: Instance) -> None:
    for number in range(COMPACTIONS):
        for place, name in enumerate(TABLES):
            instance.submit(compaction(name, place * COMPACTIONS + number))


def applied(instance: Instance) -> int:
    return int(query(instance._supplier, APPLIED)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_is_stopped_or_killed_loses_nothing_and_applies_nothing_twice(
    number: signal.Signals, instance: Instance, words: list[str], dsn: str, tmp_path: Path
) -> None:
    """The first task is ended while requests arrive, and the next one does the rest."""
    producer = threading.Thread(target=submit, args=(instance,))
    total = 3 * COMPACTIONS * len(TABLES)
    with service(words, dsn, tmp_path) as process:
        maintenance = beside(process)
        producer.start()
        wait_until(lambda: applied(instance) >= total / 10, SECONDS_MAX)
        process.send_signal(number)
        assert process.wait(SECONDS_MAX) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        maintenance.wait(SECONDS_MAX)
    assert applied(instance) < total, "it has done all"
    producer.join(SECONDS_MAX)
    with service(words, dsn, tmp_path) as process:
        wait_until(lambda: applied(instance) == total, SECONDS_MAX)
        process.terminate()
        assert process.wait(SECONDS_MAX) == 0
    for place, name in enumerate(TABLES):
        references = live(instance.table(name).files)
        made = range(place * COMPACTIONS, (place + 1) * COMPACTIONS)
        assert sorted(file for _, file, _, _ in references) == sorted(f"new {number}" for number in made)
        assert sum(rows for _, _, rows, _ in references) == 100 * COMPACTIONS
    assert query(instance._supplier, "select count(*) from rejected_commit") == [(0,)]
