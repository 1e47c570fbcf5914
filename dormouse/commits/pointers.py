"""Messages too large for a queue: the body is an object, and a pointer to it travels.

Each message has an object of its own, which goes when the message goes; that of a dead letter stays.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from dormouse.commits.queue import CommitQueue, Message, QueueDepth
from dormouse.commits.requests import BODY_BYTES_MAX, POINTER, VERSION, commit_id_of
from dormouse.errors import (
    InvalidCommitRequest,
    ObjectAlreadyExists,
    ObjectNotFound,
    ObjectStoreError,
)
from dormouse.model.text import narrow_id
from dormouse.objects import ObjectStore

OBJECT_PREFIX = "commits/"
RETRY_SECONDS = 5.0
_OBJECT_NAME = re.compile(r"commits/[0-9a-f]{32}-[0-9a-f]{32}\.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PointedMessage(Message):
    """A message whose body was an object."""

    pointer: Message
    object_name: str


class PointerQueue:
    """A `CommitQueue` that sends what is too large for another one as a pointer to the object store."""

    def __init__(self, queue: CommitQueue, objects: ObjectStore) -> None:
        self._queue = queue
        self._objects = objects

    @property
    def body_bytes_max(self) -> int:
        return BODY_BYTES_MAX

    def send(self, bodies: Sequence[str]) -> None:
        """Send messages; first the objects are written, so that no pointer leads nowhere."""
        self._queue.send([body if self._fits(body) else self._put(body) for body in bodies])

    def receive(self, limit: int, wait_seconds: float = 0.0) -> list[Message]:
        found, unreadable = with_bodies(self._queue.receive(limit, wait_seconds), self._objects)
        if unreadable:
            self._queue.retry_later(unreadable, RETRY_SECONDS)
        return found

    def delete(self, messages: Sequence[Message]) -> None:
        """The messages first: a pointer must not outlive its object."""
        self._queue.delete(messages)
        delete_bodies(messages, self._objects)

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        self._queue.retry_later(messages, seconds)

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """A dead letter is the pointer, and its object is kept."""
        as_sent = [
            message.pointer if isinstance(message, PointedMessage) else message for message in messages
        ]
        self._queue.bury(as_sent, reason)

    def depth(self) -> QueueDepth:
        return self._queue.depth()

    def _fits(self, body: str) -> bool:
        bytes_max = self._queue.body_bytes_max
        return len(body) * 4 <= bytes_max or len(body.encode(errors="replace")) <= bytes_max

    def _put(self, body: str) -> str:
        """Writes the body's object; gives the pointer."""
        commit_id = commit_id_of(body)
        name = f"{OBJECT_PREFIX}{narrow_id(commit_id or body).hex}-{uuid4().hex}.json"
        try:
            data = body.encode()
        except UnicodeEncodeError:
            raise InvalidCommitRequest("a message must be text without lone surrogates") from None
        if len(data) > BODY_BYTES_MAX:
            raise InvalidCommitRequest(
                f"a commit request of {len(data)} bytes is too large; "
                f"send several of at most {BODY_BYTES_MAX} bytes"
            )
        try:
            self._objects.put(name, data)
        except ObjectAlreadyExists:
            # the store's client tried again a write that had succeeded
            if self._objects.get(name) != data:
                raise
        pointer = {"version": VERSION, "type": POINTER, "commit_id": commit_id, "object": name}
        return json.dumps(pointer, separators=(",", ":"))


def with_bodies(messages: Sequence[Message], objects: ObjectStore) -> tuple[list[Message], list[Message]]:
    """Messages with their objects as bodies, and those whose object cannot be read now, to be tried again.

    A pointer whose object is gone stays as it is: `decode` says what that means.
    """
    found, unreadable = list[Message](), list[Message]()
    for message in messages:
        try:
            found.append(_followed(message, objects))
        except ObjectStoreError as error:
            logger.warning("a commit request waits for its object: %s", error)
            unreadable.append(message)
    return found, unreadable


def delete_bodies(messages: Sequence[Message], objects: ObjectStore) -> None:
    """Deletes the objects of messages that are gone."""
    names = [message.object_name for message in messages if isinstance(message, PointedMessage)]
    for name, why in objects.delete(names) if names else ():
        logger.warning("%s is not needed and could not be deleted: %s", name, why)


def _followed(message: Message, objects: ObjectStore) -> Message:
    name = object_of(message.body)
    try:
        if name is None or objects.size(name) > BODY_BYTES_MAX:
            return message  # larger objects are not written by us
        body = objects.get(name).decode()
    except (ObjectNotFound, UnicodeDecodeError):
        return message
    return PointedMessage(body, message.receipt, message.receive_count, message.sent_at, message, name)


def object_of(body: str) -> str | None:
    """The object that a pointer names; None for every other message, and for objects that are no bodies."""
    if not body.startswith(f'{{"version":{VERSION},"type":"{POINTER}",'):
        return None
    try:
        name = json.loads(body).get("object")
    except (ValueError, RecursionError):
        return None
    # a forged pointer must not have us read, or delete, a table's data
    return name if isinstance(name, str) and _OBJECT_NAME.fullmatch(name) else None
