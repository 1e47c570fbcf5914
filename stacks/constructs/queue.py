"""A queue with dead letters."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_sqs as sqs
from constructs import Construct

DEAD_LETTER_DAYS = 14
"""The longest retention of SQS. It is counted from when a message was first sent, not from when it died."""

RECEIVE_WAIT = cdk.Duration.seconds(20)


class Queue(Construct):
    """A standard queue with a queue for its dead letters, encrypted with keys of SQS, TLS only.

    No other queue may use it for dead letters, which would look like messages that were sent to it. The queue
    of dead letters is open to other queues: to name this queue as its only source, each of the two would have
    to exist before the other. So `dormouse dead-letters` checks the source of each dead letter.
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
