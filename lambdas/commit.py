"""The lambda that applies commit requests from SQS.

Its event source mapping must report batch item failures.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BasePartialBatchProcessor,
    EventType,
    process_partial_response,
)

from dormouse.errors import CommitRejected
from dormouse.objects import ObjectStore, open_store
from dormouse.objects.store import note_activity
from dormouse.postgres.connection import Supplier
from dormouse.postgres.session import COMMIT
from dormouse.settings.lambdas import (
    COMMITS_APPLIED,
    COMMITS_DEAD,
    COMMITS_LATER,
    COMMITS_REJECTED,
    CommitEnvironment,
    field,
)
from dormouse.state.commits import sqs_event
from dormouse.state.commits.sqs_event import Answer
from lambdas.database import database
from lambdas.services import called, tracer


class CommitBatch(BasePartialBatchProcessor):
    """A batch of commit requests, all of which are applied before the result of any is reported.

    Requests of the same table and kind are applied by one SQL statement, so they cannot be applied one by
    one.
    """

    def __init__(self, supplier: Supplier, objects: ObjectStore, environment: CommitEnvironment) -> None:
        super().__init__(EventType.SQS, raise_on_entire_batch_failure=False)
        self._apply = partial(
            sqs_event.handle,
            supplier=supplier,
            objects=objects,
            receives_max=environment.receives_max,
            patience_seconds=environment.patience_seconds,
        )
        self.answer = Answer(frozenset(), 0, 0, 0, 0)

    def _prepare(self) -> None:
        super()._prepare()  # type: ignore[no-untyped-call]
        self.answer = self._apply({"Records": self.records})

    def _process_record(self, record: dict[str, Any]) -> Any:
        data = self._to_batch_type(record, self.event_type)
        if record["messageId"] not in self.answer.again:
            return self.success_handler(data, None)
        return self.failure_handler(data, (CommitRejected, CommitRejected("to be tried again"), None))

    async def _async_process_record(self, record: dict[str, Any]) -> Any:
        raise NotImplementedError


@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Applies the commit requests in the event. Returns the ids of the messages that SQS must deliver again.

    It closes its connections at the end, so that the database can pause.
    """
    with called(CommitEnvironment, "commit", context) as call:
        field(event, "Records", list)  # checked first: an invalid event must not wake the database
        objects = open_store(call.environment.objects)
        with database(call, objects, **COMMIT) as (supplier, owned):
            batch = CommitBatch(supplier, owned, call.environment)
            answer = process_partial_response(
                event=event, record_handler=lambda record: None, processor=batch, context=context
            )
        done = batch.answer
        if done.applied:
            note_activity(objects)
        counts = (done.applied, done.rejected, done.later, done.dead)
        names = (COMMITS_APPLIED, COMMITS_REJECTED, COMMITS_LATER, COMMITS_DEAD)
        call.count(**dict(zip(names, counts, strict=True)))
        return dict(answer)
