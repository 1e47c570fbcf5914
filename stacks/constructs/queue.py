"""A queue with a dead-letter queue."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_sqs as sqs
from constructs import Construct

DEAD_LETTER_DAYS = 14
"""The retention of dead letters, the longest that SQS allows. It begins when a message is first sent."""

KEEP_ACTIONS = [
    "sqs:DeleteMessage",
    "sqs:GetQueueAttributes",
    "sqs:ListQueueTags",
    "sqs:ReceiveMessage",
    "sqs:SendMessage",
    "sqs:TagQueue",
]
"""The actions with which a lambda renews the messages of a paused instance.

It sends messages again, which restarts their retention. A tag of the queue records the time.
"""

RECEIVE_WAIT = cdk.Duration.seconds(20)


class Queue(Construct):
    """A standard queue with its dead-letter queue. Both are encrypted with keys of SQS, and accept only TLS.

    No other queue may send its dead letters to the main queue, where they would look like ordinary messages.
    Any queue may send its dead letters to the dead-letter queue. A rule against that would name the main
    queue, so each of the two would have to exist before the other. So `dormouse dead-letters` checks the
    source of each dead letter.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        visibility_seconds: int,
        retention_days: int,
        receives_max: int,
        removal_policy: cdk.RemovalPolicy = cdk.RemovalPolicy.DESTROY,
    ) -> None:
        super().__init__(scope, construct_id)
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=cdk.Duration.days(DEAD_LETTER_DAYS),
            removal_policy=removal_policy,
        )
        self.queue = sqs.Queue(
            self,
            "Queue",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            visibility_timeout=cdk.Duration.seconds(visibility_seconds),
            retention_period=cdk.Duration.days(retention_days),
            receive_message_wait_time=RECEIVE_WAIT,
            redrive_allow_policy=sqs.RedriveAllowPolicy(redrive_permission=sqs.RedrivePermission.DENY_ALL),
            dead_letter_queue=sqs.DeadLetterQueue(max_receive_count=receives_max, queue=self.dead_letters),
            removal_policy=removal_policy,
        )
