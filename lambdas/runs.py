"""Lambdas that submit, poll and cancel runs on EMR. They call only EMR, and so need no VPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.aws import emr
from dormouse.aws.aws import Aws, open_session
from dormouse.aws.emr import Run
from dormouse.settings.lambdas import RunsEnvironment
from lambdas.services import called, logger, tracer


@tracer.capture_lambda_handler(capture_response=False)
def submit(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Submits a created run to EMR. Returns its identifiers.

    They are {"engine", "run_id", "id"}, and "application" on EMR Serverless or "cluster" on EC2.
    """
    with called(RunsEnvironment, "runs", context) as call:
        run = Run.of(event)
        submitted = emr.submit(call.environment, run, Aws(open_session(call.environment.region)))
        logger.info("run %s is %s", run.run_id, submitted)
        return submitted


@tracer.capture_lambda_handler(capture_response=False)
def follow(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Returns the state of a submitted run.

    It is {"state", "reason"}, where "state" is RUNNING, SUCCEEDED, FAILED or CANCELLED.
    """
    with called(RunsEnvironment, "runs", context) as call:
        found = emr.follow(event, Aws(open_session(call.environment.region)))
        return {"state": found.state, "reason": found.reason}


@tracer.capture_lambda_handler(capture_response=False)
def cancel(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Cancels a submitted run; a run that has ended stays as it is."""
    with called(RunsEnvironment, "runs", context) as call:
        emr.cancel(event, Aws(open_session(call.environment.region)))
        return {}
