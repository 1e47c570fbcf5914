"""Stops the database again when AWS starts it while the instance is paused; a queue brings the events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools import Logger, Metrics, Tracer
from aws_lambda_powertools.metrics import MetricUnit

from dormouse.settings.lambdas import PauseEnvironment, load_environment
from dormouse.system.aws import Aws, open_session
from dormouse.system.repause import repause

METRIC = "RunningWhilePaused"
logger, metrics, tracer = Logger(), Metrics(), Tracer()


@logger.inject_lambda_context
@metrics.log_metrics
@tracer.capture_lambda_handler
def handler(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Answers which messages come back: all, whatever they say, as long as there is something to wait for."""
    settings = load_environment(PauseEnvironment)
    found = repause(Aws(open_session(settings.region)), settings.cluster, settings.state_parameter)
    logger.info("looked at the cluster", desired=found.desired, status=found.status, ended=found.ended)
    metrics.add_metric(METRIC, MetricUnit.Count, int(found.runs_while_paused))
    records = () if found.ended else event["Records"]
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in records]}
