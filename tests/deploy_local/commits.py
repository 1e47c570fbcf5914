"""Valid and invalid commit requests, sent through the queue to the deployed lambda, and their results."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dormouse.settings.resources import CommitResources
from tests.commits import add, assignment, replacement
from tests.deploy_local.account import Account, Person
from tests.deploy_local.processes import RunFailed
from tests.stored import file, live, ref
from tests.support.api import Instance
from tests.support.commits import AddFiles, CommitRequest, encode

COMPACTIONS = 250
"""The number of compactions for each table. Each has three requests that depend on each other."""

TABLES = ("customers", "lineitem", "orders", "parts")
LARGE_FILES = 12_000
"""The number of files in one request. It is too large for a message and is stored as an object."""

MALFORMED = ("nonsense", "{}", '{"version": 1, "type": "add_files"}', '["add_files"]')
UNREADABLE = '{"version": 1, "commit_id": "buried", "type": "nothing"}'
WITHOUT_FILES = "without files"
SHUFFLED_TOGETHER = 60
TWICE = 200


@dataclass
class Expected:
    """The results that the requests must have in the deployed lambda."""

    applied: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    """The commit ids that must be rejected, each with a text that the reason must contain."""

    dead: int = 0


def _three(table: str, number: int) -> list[CommitRequest]:
    """Returns the requests of a compaction of one file, the last first, because the queue has no order."""
    old, new, job = (f"{table}-{what}-{number}" for what in ("old", "new", "job"))
    return [replacement(table, job, [old], new), assignment(table, job, old), add(table, old)]


def send_good(instance: Instance, expected: Expected) -> int:
    """Sends requests that must be applied, some of them twice. Returns the number of messages."""
    good = [request for table in TABLES for n in range(COMPACTIONS) for request in _three(table, n)]
    chosen = random.Random(7)  # the same requests meet each time, as far as lambdas let them
    for start in range(0, len(good), SHUFFLED_TOGETHER):
        part = good[start : start + SHUFFLED_TOGETHER]
        chosen.shuffle(part)
        good[start : start + SHUFFLED_TOGETHER] = part
    expected.applied += [request.commit_id for request in good]
    large = tuple(file(name, ref(name)) for name in (f"large-{n}" for n in range(LARGE_FILES)))
    good.append(AddFiles(commit_id="large", table="bulk", files=large))
    expected.applied.append("large")
    instance.submit(good)
    again = chosen.sample(good[:-1], TWICE)
    instance.submit(again)
    return len(good) + len(again)


def send_bad(account: Account, instance: Instance, resources: CommitResources, expected: Expected) -> int:
    """Sends requests that must be rejected, and messages that no committer can read.

    The valid requests must have been applied before. Returns the number of messages.
    """
    bad = list(_refused(expected))
    instance.submit(bad)
    raw = [*MALFORMED, encode(add("nowhere", "lost", "to nowhere"))]
    expected.rejected["to nowhere"] = "nowhere"
    sqs = account.client("sqs")
    for url in resources.queues:
        for body in raw:
            sqs.send_message(QueueUrl=url, MessageBody=body)
        expected.dead += len(MALFORMED)
    return len(bad) + len(raw) * len(resources.queues)


def _refused(expected: Expected) -> Iterator[CommitRequest]:
    table = TABLES[0]
    yield assignment(table, "job without files", "never added", commit_id=WITHOUT_FILES)
    expected.rejected[WITHOUT_FILES] = "tried"
    expected.dead += 1
    yield add("bulk", "large-1", "taken")
    expected.rejected["taken"] = "large-1"
    yield add(table, "other contents", f"add {table}-old-0")  # the id of another request


def wait_until_applied(account: Account, instance: Instance, expected: Expected) -> None:
    """Waits until each request is applied or rejected. In the emulator, visibility timeouts end at once."""
    ids = [*expected.applied, *expected.rejected]

    def missing() -> list[str]:
        statuses = [status for part in _parts(ids) for status in instance.commits.statuses(part)]
        return [status.commit_id for status in statuses if status.state in ("unknown", "pending")]

    wait(account, lambda: f"{len(ids)} commits, like {ids[0]!r}" if (ids := missing()) else "")


def check(instance: Instance, expected: Expected) -> None:
    """Checks the references of each table and the status of each commit."""
    for name in TABLES:
        found = sorted(filename for _, filename, _, _ in live(instance.table(name).files))
        if found != sorted(f"{name}-new-{number}" for number in range(COMPACTIONS)):
            raise RunFailed(
                f"table {name} has {len(found)} references, like {found[:2]}: not those committed"
            )
    count = sum(1 for _ in instance.table("bulk").files.file_references())
    if count != LARGE_FILES:
        raise RunFailed(f"table bulk has {count} references, not {LARGE_FILES}")
    for status in (one for part in _parts(expected.applied) for one in instance.commits.statuses(part)):
        if status.state != "applied":
            raise RunFailed(f"commit {status.commit_id!r} is {status.state}: {status.error}")
    for commit_id, text in expected.rejected.items():
        status = instance.commit_status(commit_id)
        if status.state != "rejected" or text not in str(status.error):
            raise RunFailed(
                f"commit {commit_id!r} is {status.state}, {status.error}: not a refusal with {text!r}"
            )
    reused = instance.commit_status(f"add {TABLES[0]}-old-0")
    if reused.state != "applied" or not reused.error:
        raise RunFailed(
            f"a commit id that came twice is {reused}: its status does not say that the second was refused"
        )


def wait_for_dead_letters(account: Account, resources: CommitResources, expected: Expected) -> None:
    sqs = account.client("sqs")

    def look() -> str:
        depths = [_depth(sqs, url) for url in (*resources.dead_letters, *resources.queues)]
        dead, left = sum(depths[: len(resources.dead_letters)]), sum(depths[len(resources.dead_letters) :])
        if dead > expected.dead:
            raise RunFailed(f"{dead} messages are dead letters, not {expected.dead}")
        return (
            ""
            if dead == expected.dead and left == 0
            else f"{dead} dead letters of {expected.dead}, {left} left"
        )

    wait(account, look)


def send_again(
    account: Account,
    instance: Instance,
    resources: CommitResources,
    expected: Expected,
    operator: Person,
) -> str:
    """Sends dead letters again with the command, once the files that they lacked have been added.

    Readable ones are applied. Unreadable ones are listed with the reason, and stay.
    """
    sqs, table_id = account.client("sqs"), instance.table("parts").files.table.table_id
    request, lacking = add("parts", "from the dead"), add(TABLES[0], "never added")
    instance.submit([lacking])
    expected.applied.append(lacking.commit_id)
    wait_until_applied(account, instance, expected)
    first, *_, last = resources.dead_letters
    for url, body in ((first, encode(request, table_id=table_id)), (last, UNREADABLE)):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    arguments = ("dead-letters", "--instance", account.instance_id, "--send-again", "--json")
    letters = json.loads(account.dormouse(*arguments, **operator))
    sent = {letter["commit_id"] for letter in letters if letter["is_sent_again"]}
    kept = {letter["body"]: letter["reason"] for letter in letters if not letter["is_sent_again"]}
    if sent != {request.commit_id, WITHOUT_FILES}:
        raise RunFailed(
            f"the commits {sent} were sent again, not {request.commit_id!r} and {WITHOUT_FILES!r}"
        )
    if kept.keys() != {*MALFORMED, UNREADABLE} or not all(kept.values()):
        raise RunFailed(f"the letters that cannot be read are listed as {kept}")

    def left() -> str:
        statuses = instance.commits.statuses(sorted(sent))
        return "; ".join(
            f"{one.commit_id!r}, which is {one.state}" for one in statuses if one.state != "applied"
        )

    wait(account, left)
    wait_for_dead_letters(account, resources, expected)
    return f"2 applied, {expected.dead} cannot be read and stay"


def wait(account: Account, look: Callable[[], str]) -> None:
    """Waits until `look` returns an empty string.

    Before each further call, all visibility timeouts of the emulator end.
    """
    wait_for(account, look, account.meanwhile)


def wait_for(account: Account, look: Callable[[], str], meanwhile: Callable[[], object] = int) -> None:
    """Waits until `look` returns an empty string; raises RunFailed after the account's limit.

    Only sleeps count towards the limit, so that there are as many looks on a busy machine as on an idle one.
    """
    for _ in range(round(account.wait_seconds_max / account.poll_seconds)):
        if not (left := look()):
            return
        time.sleep(account.poll_seconds)
        meanwhile()
    raise RunFailed(f"after {account.wait_seconds_max:g} s there is still {left}")


def _depth(sqs: object, url: str) -> int:
    names = [f"ApproximateNumberOfMessages{suffix}" for suffix in ("", "NotVisible", "Delayed")]
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]  # type: ignore[attr-defined]
    return sum(int(found[name]) for name in names)


def _parts(ids: list[str], size: int = 500) -> Iterator[list[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))
