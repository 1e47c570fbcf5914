"""Messages too large for a queue: the body is stored as an object, and the queue gets a pointer to it.

Each message has an object of its own, which is deleted after the message; a dead letter keeps its object. If
a process dies between the two steps, `sweep_bodies` deletes the object later.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from dormouse.errors import (
    InvalidCommitRequest,
    ObjectNotFound,
    ObjectStoreError,
)
from dormouse.model.text import narrow_id
from dormouse.objects.ledger import put_new, sweep, unknown_pages
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_transaction
from dormouse.state.commits.encoding import TABLE_ID_MAX
from dormouse.state.commits.outcomes import TABLE_OF_MESSAGE
from dormouse.state.commits.queue import (
    RECEIVED_BYTES_MAX,
    CommitQueue,
    Message,
    QueueDepth,
    TableName,
)
from dormouse.state.commits.requests import (
    BODY_BYTES_MAX,
    POINTER,
    VERSION,
    commit_id_of,
    table_id_of,
)

# The names of objects that are bodies of large requests contain the commit's key, its table and their age.

OBJECT_PREFIX = "commits/"
_NAME = re.compile(r"commits/([0-9a-f]{32})-([0-9a-f]{32})\.json")
_TIMED = "7"  # as in a UUID of version 7: https://www.rfc-editor.org/rfc/rfc9562#name-uuid-version-7
_OF_TABLE = "8"  # like _TIMED, followed by the table's id


def new_name(commit_key: UUID, table_id: int | None) -> str:
    """Returns a new, unique name for the object of a body."""
    made = f"{time.time_ns() // 1_000_000:012x}"
    has_table = table_id is not None and 0 <= table_id <= TABLE_ID_MAX  # anything may be sent to a queue
    about = _TIMED if not has_table else f"{_OF_TABLE}{table_id:08x}"
    return f"{OBJECT_PREFIX}{commit_key.hex}-{made}{about}{uuid4().hex[12 + len(about) :]}.json"


def commit_key_of(name: str) -> str | None:
    """Returns the commit key in the name of a body's object, in hexadecimal.

    Returns None for the name of any other object.
    """
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def made_at(name: str) -> float | None:
    """Returns the time in the name of a body's object, in seconds since 1970 by its sender's clock.

    This is when the object was made. Returns None when the name contains no time.
    """
    match = _NAME.fullmatch(name)
    return int(match[2][:12], 16) / 1_000 if match and match[2][12] in (_TIMED, _OF_TABLE) else None


def table_id_in(name: str) -> int | None:
    """Returns the table id in the name of a body's object; None when the name contains none."""
    match = _NAME.fullmatch(name)
    return int(match[2][13:21], 16) if match and match[2][12] == _OF_TABLE else None


RETRY_SECONDS = 5.0
FITTING_AT_FIRST = 10_000
"""The number of messages to receive at once, at first.

If their bodies exceed `RECEIVED_BYTES_MAX`, the number falls to the count that fitted. Afterwards it doubles
each time that messages are received.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PointedMessage(Message):
    """A message whose body was read from an object."""

    pointer: Message
    object_name: str


class PointerQueue:
    """A `CommitQueue` that wraps another queue, and replaces bodies too large for that queue by pointers."""

    def __init__(self, queue: CommitQueue, objects: ObjectStore) -> None:
        self.body_bytes_max = BODY_BYTES_MAX
        self.visibility_seconds = queue.visibility_seconds
        self.knows_tables = queue.knows_tables
        self._queue = queue
        self._objects = objects
        self._fitting = FITTING_AT_FIRST

    def send(self, bodies: Sequence[str], tables: Collection[TableName] = ()) -> None:
        """Sends messages, after writing the objects of large bodies.

        In this order, no pointer is sent before its object exists.
        """
        self._queue.send([body if self._fits(body) else self._put(body) for body in bodies], tables)

    def receive(self, limit: int, wait_seconds: float = 0.0) -> list[Message]:
        count = min(limit, self._fitting)
        taken, unreadable, rest = with_bodies(self._queue.receive(count, wait_seconds), self._objects)
        # messages that are too large together go back, and the next receive asks for fewer
        self._fitting = max(1, len(taken)) if rest else min(max(self._fitting, 2 * count), FITTING_AT_FIRST)
        for messages, seconds in ((unreadable, RETRY_SECONDS), (rest, 0.0)):
            if messages:
                self._queue.send_again(messages, seconds)
        return taken

    def delete(self, messages: Sequence[Message]) -> None:
        """Deletes messages, and then the objects of their bodies.

        In this order, no pointer remains after its object is deleted.
        """
        self._queue.delete(messages)
        delete_bodies(messages, self._objects)

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        self._queue.retry_later(messages, seconds)

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        self._queue.send_again(_as_sent(messages), seconds)

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Moves the pointers of messages to the dead letters, and keeps their objects."""
        self._queue.bury(_as_sent(messages), reason)

    def depth(self) -> QueueDepth:
        return self._queue.depth()

    def _fits(self, body: str) -> bool:
        bytes_max = self._queue.body_bytes_max
        return len(body) * 4 <= bytes_max or len(body.encode(errors="replace")) <= bytes_max

    def _put(self, body: str) -> str:
        """Writes a body to an object; returns the pointer to it as JSON."""
        commit_id = commit_id_of(body)
        table_id = table_id_of(body)
        name = new_name(narrow_id(commit_id or body), table_id)
        try:
            data = body.encode()
        except UnicodeEncodeError:
            raise InvalidCommitRequest("a message must be text without lone surrogates") from None
        if len(data) > BODY_BYTES_MAX:
            raise InvalidCommitRequest(
                f"a commit request of {len(data)} bytes is too large; "
                f"send several of at most {BODY_BYTES_MAX} bytes"
            )
        put_new(self._objects, name, data)
        # the object of a buried message is kept until this table is dropped
        about = {"commit_id": commit_id, "table_id": table_id}
        pointer = {"version": VERSION, "type": POINTER, **about, "object": name}
        return json.dumps(pointer, separators=(",", ":"))


def with_bodies(
    messages: Sequence[Message], objects: ObjectStore
) -> tuple[list[Message], list[Message], list[Message]]:
    """Replaces pointers by the bodies in their objects; returns three lists of messages.

    1. The messages with their bodies. A pointer whose object no longer exists stays as it is, and `decode`
       refuses it.
    2. Messages whose objects cannot be read now.
    3. Messages that would make the first list larger than `RECEIVED_BYTES_MAX`.
    """
    taken, unreadable, rest = list[Message](), list[Message](), list[Message]()
    room = RECEIVED_BYTES_MAX
    for message in messages:
        try:
            name = object_of(message.body)
            size = 0 if name is None else objects.size(name)
            if name is None or size > BODY_BYTES_MAX:  # Dormouse writes no larger objects
                taken.append(message)
            elif size > room and taken:
                rest.append(message)
            else:
                taken.append(_followed(message, name, objects))
                room -= size
        except ObjectNotFound:
            taken.append(message)
        except ObjectStoreError as error:
            logger.warning("a commit request waits for its object: %s", error)
            unreadable.append(message)
    return taken, unreadable, rest


def delete_bodies(messages: Sequence[Message], objects: ObjectStore) -> None:
    """Deletes the objects with the bodies of messages that were deleted."""
    names = [(message.object_name, None) for message in messages if isinstance(message, PointedMessage)]
    sweep(objects, [names] if names else []).warn()


def _as_sent(messages: Sequence[Message]) -> list[Message]:
    return [message.pointer if isinstance(message, PointedMessage) else message for message in messages]


def _followed(message: Message, name: str, objects: ObjectStore) -> Message:
    try:
        body = objects.get(name).decode()
    except UnicodeDecodeError:
        return message
    facts = (message.receipt, message.receive_count, message.sent_at, message, name)
    return PointedMessage(body, *facts, born=message.born)


def object_of(body: str) -> str | None:
    """Returns the name of the object that a pointer names.

    Returns None if the body is no pointer, or if the object does not have the name of a body's object.
    """
    if not body.startswith(f'{{"version":{VERSION},"type":"{POINTER}",'):
        return None
    try:
        name = json.loads(body).get("object")
    except (ValueError, RecursionError):
        return None
    # the name is checked, as a forged pointer could make a committer read or delete a table's data
    return name if isinstance(name, str) and commit_key_of(name) is not None else None


# A body is left without a message when a committer or a sender dies between the object and the message.

ELSEWHERE_SECONDS = 2 * 365 * 86_400.0
"""How long the bodies of unknown commits are kept when the queue is SQS, in seconds.

SQS keeps a message for 14 days. But while an instance is paused, its messages are sent again and again. A
queue in the database can be searched, so there the setting `objects_kept_seconds` is enough.
"""

APPLIED_SECONDS = 3_600.0
BATCH_NAMES = 1_000

_QUERIES = load(__package__ or "", "pointers")
_FORGET_DEAD_POINTERS = _QUERIES["forget_dead_pointers"].including(table_of_message=TABLE_OF_MESSAGE)


def sweep_bodies(supplier: Supplier, objects: ObjectStore, kept_seconds: float = ELSEWHERE_SECONDS) -> int:
    """Deletes the bodies that no message refers to; returns the number of deleted bodies.

    A dead letter keeps its body until its table is dropped. Bodies of unknown commits stay for
    `kept_seconds`, as their messages may be in a queue that cannot be searched.
    """
    dead = rows_of(_FORGET_DEAD_POINTERS)
    run_transaction(supplier, dead, scans=True, operation="forget dead letters")

    def needless(names: Sequence[str]) -> list[str]:
        values = {
            "commit_keys": [commit_key_of(name) for name in names],
            "table_ids": [table_id_in(name) for name in names],
            "made_at": [made_at(name) for name in names],
            "kept_seconds": kept_seconds,
            "applied_seconds": APPLIED_SECONDS,
        }
        rows = run_transaction(supplier, rows_of(_QUERIES["needless"], values), operation="needless bodies")
        return [names[number - 1] for (number,) in rows]

    listed = (item for item in objects.list(OBJECT_PREFIX) if commit_key_of(item[0]) is not None)
    return sweep(objects, unknown_pages(listed, needless, BATCH_NAMES)).warn().deleted
