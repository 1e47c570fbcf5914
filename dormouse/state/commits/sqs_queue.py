"""The commit queue in Amazon SQS: a standard queue, which must exist already."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from typing import Any

from dormouse.errors import (
    CommitQueueError,
    DependencyMissing,
    InvalidCommitRequest,
    InvalidInput,
    not_installed,
)
from dormouse.model.loops import backoff_seconds, tries
from dormouse.state.commits.queue import (
    RECEIVED_BYTES_MAX,
    Message,
    QueueDepth,
    TableName,
    batches,
    check_hidden,
)

BATCH_MESSAGES_MAX = 10
BATCH_BYTES_MAX = 2**20
BODY_BYTES_MAX = 2**20 - 4096
"""The largest body, in bytes. It leaves room for the reason that a dead letter gets."""
WAIT_SECONDS_MAX = 20
HIDDEN_SECONDS_MAX = 43_200
DELAY_SECONDS_MAX = 900
REASON_CHARACTERS_MAX = 900
ATTEMPTS_MAX = 6
RETRY_SECONDS_MIN = 0.05
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)
_ENDPOINT_REGION = re.compile(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MISSING = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "InvalidAddress"}
_DENIED = {"AccessDenied", "AccessDeniedException", "InvalidClientTokenId", "SignatureDoesNotMatch"}
_OVERTAKEN = {"ReceiptHandleIsInvalid", "MessageNotInflight", "InvalidParameterValue"}

logger = logging.getLogger(__name__)
_Entry = dict[str, Any]


class SqsQueue:
    """A `CommitQueue` at a URL of SQS. `client` holds options of the boto3 client, e.g. its region.

    Its depth is approximate; the age in it is that of the oldest message in the last batch received here.
    Dead letters go to the dead-letter queue of the queue's redrive policy.
    """

    knows_tables = False

    def __init__(
        self,
        url: str,
        *,
        visibility_seconds: float = 60.0,
        body_bytes_max: int = BODY_BYTES_MAX,
        **client: Any,
    ) -> None:
        if not url.startswith(("https://", "http://")):
            raise InvalidInput(f"commit queue {url!r}: give the URL of an SQS queue, like https://sqs.…/name")
        if url.endswith(".fifo"):
            raise InvalidInput(f"commit queue {url!r}: give a standard queue; the order does not matter")
        check_hidden("visibility_seconds", visibility_seconds, HIDDEN_SECONDS_MAX)
        region = _ENDPOINT_REGION.match(url)
        self.visibility_seconds = visibility_seconds
        self.body_bytes_max = min(body_bytes_max, BODY_BYTES_MAX)
        self._url = url
        self._options = {"region_name": region[1] if region else None, **client}
        self._oldest: Message | None = None
        self._lock = threading.Lock()

    def send(self, bodies: Sequence[str], tables: Collection[TableName] = ()) -> None:
        self._send(self._url, [{"MessageBody": self._checked(body)} for body in bodies])

    def receive(self, limit: int, wait_seconds: float = 0.0) -> list[Message]:
        if limit < 1:
            raise InvalidInput(f"limit must be at least 1, not {limit}")
        messages: list[Message] = []
        size = 0
        while len(messages) < limit and size < RECEIVED_BYTES_MAX:
            wait = 0.0 if messages else wait_seconds
            try:
                some = self._receive_some(limit - len(messages), wait)
            except CommitQueueError as error:
                if not messages:
                    raise
                logger.warning("%s", error)
                break
            messages += some
            size += sum(len(message.body) for message in some)
            if not some:
                break
        self._oldest = min(messages, key=lambda message: message.born, default=None)
        return messages

    def delete(self, messages: Sequence[Message]) -> None:
        self._for_receipts("delete_message_batch", messages, {})

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        check_hidden("seconds", seconds, HIDDEN_SECONDS_MAX)
        change = {"VisibilityTimeout": math.ceil(seconds)}
        self._for_receipts("change_message_visibility_batch", messages, change)

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        """Sends copies of the messages, and deletes the messages.

        Copies start with a new count of deliveries. SQS would bury a message that was delivered too often.
        """
        check_hidden("seconds", seconds, DELAY_SECONDS_MAX)
        delay = math.ceil(seconds)
        self._send(self._url, [{"MessageBody": each.body, "DelaySeconds": delay} for each in messages])
        self.delete(messages)

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Sends messages to the dead-letter queue, with the attribute `reason`, and deletes them here.

        If the queue has no dead-letter queue, raises `CommitQueueError` and deletes nothing.
        """
        if not messages:
            return
        text = _NOT_XML.sub("�", reason)[:REASON_CHARACTERS_MAX] or "no reason was given"
        attributes = {"reason": {"DataType": "String", "StringValue": text}}
        entries = [{"MessageBody": message.body, "MessageAttributes": attributes} for message in messages]
        self._send(self._dead_letters, entries)
        self.delete(messages)

    def depth(self) -> QueueDepth:
        answer = self._call("get_queue_attributes", QueueUrl=self._url, AttributeNames=list(_COUNTS))
        messages = sum(int(answer["Attributes"][name]) for name in _COUNTS)
        oldest = self._oldest
        return QueueDepth(messages, oldest.age_seconds if messages and oldest else 0.0, approximate=True)

    def _checked(self, body: str) -> str:
        if _NOT_XML.search(body) or not body:
            raise InvalidCommitRequest("a message for SQS must be text of characters that XML allows")
        if (size := len(body.encode())) > self.body_bytes_max:
            raise InvalidCommitRequest(
                f"a message of {size} bytes is too large for commit queue {self._url}: "
                f"at most {self.body_bytes_max}"
            )
        return body

    def _receive_some(self, limit: int, wait_seconds: float) -> list[Message]:
        answer = self._call(
            "receive_message",
            QueueUrl=self._url,
            MaxNumberOfMessages=min(limit, BATCH_MESSAGES_MAX),
            WaitTimeSeconds=min(math.ceil(wait_seconds), WAIT_SECONDS_MAX),
            VisibilityTimeout=math.ceil(self.visibility_seconds),
            MessageSystemAttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
        )
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return [_message(entry, now) for entry in answer.get("Messages", ())]

    def _send(self, url: str, entries: Sequence[_Entry]) -> None:
        """Sends entries, ten in a call; sends an entry again if it failed through a fault of SQS."""
        for batch in batches(entries, _size, BATCH_BYTES_MAX, BATCH_MESSAGES_MAX):
            if failed := self._batch("send_message_batch", url, batch):
                raise _refused(f"commit queue {url} refused", failed, len(batch))

    def _for_receipts(self, operation: str, messages: Sequence[Message], change: _Entry) -> None:
        """Calls an operation on deliveries, ten in a call; skips messages that were delivered again since."""
        entries = [{"ReceiptHandle": message.receipt, **change} for message in messages]
        failed: list[_Entry] = []
        for start in range(0, len(entries), BATCH_MESSAGES_MAX):
            failed += self._batch(operation, self._url, entries[start : start + BATCH_MESSAGES_MAX])
        serious = [entry for entry in failed if _code(entry) not in _OVERTAKEN]
        if serious:
            raise _refused(f"commit queue {self._url}: {operation} failed for", serious, len(messages))

    def _batch(self, operation: str, url: str, entries: Sequence[_Entry]) -> list[_Entry]:
        """Runs a batch operation, and retries the entries that failed through a fault of SQS.

        Returns the failures that are no fault of SQS, and those that remain after `ATTEMPTS_MAX` tries.
        """
        numbered = {str(number): {"Id": str(number), **entry} for number, entry in enumerate(entries)}
        hopeless: list[_Entry] = []
        pending = list(numbered)
        for _ in tries(tries_max=ATTEMPTS_MAX, pause=partial(backoff_seconds, seconds_min=RETRY_SECONDS_MIN)):
            answer = self._call(operation, QueueUrl=url, Entries=[numbered[number] for number in pending])
            failed = answer.get("Failed", [])
            hopeless += [entry for entry in failed if entry.get("SenderFault", False)]
            again = [entry for entry in failed if not entry.get("SenderFault", False)]
            if not again:
                return hopeless
            pending = [entry["Id"] for entry in again]
        return hopeless + again

    @cached_property
    def _dead_letters(self) -> str:
        """The URL of the dead-letter queue."""
        answer = self._call("get_queue_attributes", QueueUrl=self._url, AttributeNames=["RedrivePolicy"])
        policy = answer.get("Attributes", {}).get("RedrivePolicy", "")
        arn = re.search(r'"deadLetterTargetArn"\s*:\s*"arn:[^:"]*:sqs:[^:"]*:(\d+):([^"]+)"', policy)
        if arn is None:
            raise CommitQueueError(
                f"commit queue {self._url} has no dead-letter queue: give it a redrive policy"
            )
        found = self._call("get_queue_url", QueueName=arn[2], QueueOwnerAWSAccountId=arn[1])
        return str(found["QueueUrl"])

    def _call(self, operation: str, **parameters: Any) -> Any:
        with self._errors():
            return getattr(self._client, operation)(**parameters)

    @property
    def _client(self) -> Any:
        with self._lock:  # making one is not safe in threads; using one is
            return self._connected

    @cached_property
    def _connected(self) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise not_installed("boto3", "aws") from None
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 4},
            connect_timeout=5,
            read_timeout=WAIT_SECONDS_MAX + 20,
            max_pool_connections=32,
        )
        return boto3.session.Session().client("sqs", config=config, **self._options)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns each error of boto3 into a `CommitQueueError` of one line that names the queue."""
        try:
            yield
        except (DependencyMissing, CommitQueueError):
            raise
        except Exception as error:
            from botocore.exceptions import BotoCoreError, ClientError

            if not isinstance(error, BotoCoreError | ClientError | ValueError):
                raise
            if type(error).__name__ == "NoRegionError":
                raise InvalidInput(f"commit queue {self._url} has no region: set AWS_REGION") from error
            raise CommitQueueError(f"commit queue {self._url} {_reason(error)}") from error


def _message(entry: _Entry, now: datetime) -> Message:
    """Returns a delivery by SQS as a `Message`; `now` is the time by the clock of SQS."""
    attributes = entry["Attributes"]
    sent_at = datetime.fromtimestamp(int(attributes["SentTimestamp"]) / 1000, UTC)
    count = int(attributes["ApproximateReceiveCount"])
    born = time.monotonic() - (now - sent_at).total_seconds()
    return Message(entry["Body"], entry["ReceiptHandle"], count, sent_at, born=born)


def _size(entry: _Entry) -> int:
    """Returns the size of an entry in bytes, including its attributes."""
    attributes = entry.get("MessageAttributes", {})
    texts = [text for name, value in attributes.items() for text in (name, *value.values())]
    return len(entry["MessageBody"].encode()) + sum(len(text.encode()) for text in texts)


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    response = getattr(error, "response", {})
    code = _code(response.get("Error", {}))
    if code in _MISSING:
        return f"does not exist: {said}"
    if code in _DENIED or response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 403:
        return f"denies access: {said}"
    kind = type(error).__name__
    if kind in {"NoCredentialsError", "PartialCredentialsError"}:
        return f"has no credentials: {said}"
    if kind in {"EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError"}:
        return f"cannot be reached: {said}"
    return f"failed: {said}"


def _refused(what: str, failed: Sequence[_Entry], messages: int) -> CommitQueueError:
    first = f"{_code(failed[0])}: {failed[0].get('Message', '')}".rstrip(": ")
    return CommitQueueError(f"{what} {len(failed)} of {messages} messages: {first}")


def _code(fields: _Entry) -> str:
    return str(fields.get("Code", ""))
