"""A queue with dead letters."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_sqs as sqs
from constructs import Construct

DEAD_LETTER_DAYS = 14
"""The longest time for which SQS keeps messages, counted from their sending, not from their death."""

RECEIVE_WAIT = cdk.Duration.seconds(20)


class Queue(Construct):
    """A standard queue, encrypted with keys of SQS, TLS only.

    No other queue may have it for its dead letters, which would come as if they had been sent to it. That of
    its own dead letters cannot name it as the only one that may: AWS gives both their names, so that neither
    could be made before the other. So `dormouse dead-letters` looks where each came from.
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
