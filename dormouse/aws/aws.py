"""Calls of AWS operations.

A refused call raises an error of one clear line, and a throttled call is retried.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from dormouse.errors import DormouseError, InstanceError, InvalidInput, not_installed
from dormouse.model.loops import tries
from dormouse.settings.process import environment
from dormouse.settings.section import ACTIVE_SECONDS_MAX, INACTIVE_CODES, WAKE

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 8
CONNECT_SECONDS_MAX = 5
READ_SECONDS_MAX = 30
ACTIVE_PAUSE_SECONDS = 5.0

# boto3's name of a service → the prefix of its actions in policies
_PREFIXES = {"emr": "elasticmapreduce", "service-quotas": "servicequotas", "stepfunctions": "states"}
_ACTIONS = {
    ("lambda", "invoke"): "lambda:InvokeFunction",
    ("s3", "delete_objects"): "s3:DeleteObjectVersion",
    ("s3", "get_bucket_encryption"): "s3:GetEncryptionConfiguration",
    ("s3", "list_object_versions"): "s3:ListBucketVersions",
    ("service-quotas", "get_aws_default_service_quota"): "servicequotas:GetAWSDefaultServiceQuota",
}
"""The IAM actions of operations whose action has another name than the operation."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_UNKNOWN = {
    "AuthFailure", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSignatureException",
    "SignatureDoesNotMatch", "UnrecognizedClientException", "IncompleteSignature",
    "MissingAuthenticationToken",
}  # fmt: skip
_DENIED = {"AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation"}
_THROTTLED = {
    "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException", "Throttling",
    "ThrottledException", "ThrottlingException", "TooManyRequestsException",
}  # fmt: skip
_BUSY = {
    "ConcurrentModificationException", "InvalidDBClusterStateFault", "InvalidDBInstanceState",
    "InvalidDBInstanceStateFault", "ResourceConflictException", "ResourceInUseException", "TooManyUpdates",
}  # fmt: skip
"""AWS's error codes for a resource that is being changed. The same request may succeed later."""

MISSING = frozenset(
    {
        "AWS.SimpleQueueService.NonExistentQueue", "DBClusterNotFoundFault", "DBClusterSnapshotNotFound",
        "DBClusterSnapshotNotFoundFault", "DBInstanceNotFound", "DBInstanceNotFoundFault",
        "ExecutionDoesNotExist", "NoSuchEntity", "ParameterNotFound", "QueueDoesNotExist",
        "ResourceNotFoundException", "StateMachineDoesNotExist",
    }
)  # fmt: skip
"""AWS's error codes for a resource that does not exist."""


class AwsRefused(InstanceError):
    """AWS refuses the request."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    @property
    def is_denied(self) -> bool:
        """True if the credentials lack the right to the request."""
        return self.code in _DENIED

    @property
    def is_missing(self) -> bool:
        """True if the named resource does not exist."""
        return self.code in MISSING


@dataclass(frozen=True)
class Metric:
    """A metric of CloudWatch with its dimensions, over a period in seconds."""

    namespace: str
    name: str
    dimensions: Mapping[str, str]
    period: int
    statistic: str = "Average"

    def query(self) -> dict[str, Any]:
        """Returns the metric in the form of CloudWatch's requests."""
        of = [{"Name": name, "Value": value} for name, value in self.dimensions.items()]
        metric = {"Namespace": self.namespace, "MetricName": self.name, "Dimensions": of}
        return {"Metric": metric, "Period": self.period, "Stat": self.statistic}


@dataclass(frozen=True)
class LambdaState:
    """The state of a lambda: Active, Inactive, Pending or Failed. `reason` is AWS's text, or empty."""

    name: str
    reason: str

    @property
    def is_active(self) -> bool:
        return self.name == "Active"

    @property
    def is_idle(self) -> bool:
        """True if only a call makes the lambda active."""
        return self.name == "Inactive"

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.reason}" if self.reason else self.name.lower()


class Aws:
    """A client for AWS in one account and region, made from a boto3 session."""

    def __init__(self, session: Any, region: str | None = None) -> None:
        self._session, self._region = session, region
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        """Calls an operation of AWS and returns its answer.

        Raises `AwsRefused` if AWS refuses the call, or another `InstanceError`, with a remedy, if it cannot
        be made.
        """
        with _clear(service, operation):
            return getattr(self._client(service), operation)(**parameters)

    def look(self, service: str, operation: str, **parameters: Any) -> Any:
        """Calls like `call`, but returns None for a resource that does not exist."""
        try:
            return self.call(service, operation, **parameters)
        except AwsRefused as refused:
            if refused.is_missing:
                return None
            raise

    def ask(
        self, service: str, operation: str, *, refusals: frozenset[str] = frozenset(), **given: Any
    ) -> bool:
        """Requests a change.

        Returns False if AWS answers that the resource is busy, or with a code in `refusals`.
        """
        try:
            self.call(service, operation, **given)
        except AwsRefused as refused:
            if refused.code in _BUSY or refused.code in refusals:
                logger.info("AWS does not accept this change now: %s", refused)
                return False
            raise
        return True

    def all(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        """Returns the items under `key` in all pages; an empty list for a resource that does not exist."""
        try:
            return [
                item for page in self.pages(service, operation, **parameters) for item in page.get(key, ())
            ]
        except AwsRefused as refused:
            if refused.is_missing:
                return []
            raise

    def pages(self, service: str, operation: str, **parameters: Any) -> Iterator[Any]:
        """Yields the pages of AWS's answer."""
        with _clear(service, operation):
            yield from self._client(service).get_paginator(operation).paginate(**parameters)

    def invoke(self, function: str, event: Mapping[str, Any], *, seconds_max: float) -> Any:
        """Runs a lambda once, waits, and returns its answer. Raises `InstanceError` if it fails.

        Repeats a call that AWS refuses because the lambda is not active, for ACTIVE_SECONDS_MAX.
        """
        last: AwsRefused | None = None
        for _ in tries(ACTIVE_SECONDS_MAX, pause=ACTIVE_PAUSE_SECONDS):
            try:
                return self._invoke(function, event, seconds_max)
            except AwsRefused as refused:
                if refused.code not in INACTIVE_CODES:
                    raise
                last = refused
        raise last or AssertionError("there is a first attempt")

    def queue(self, function: str, event: Mapping[str, Any]) -> None:
        """Queues an event for a lambda once, as soon as the lambda is active.

        AWS drops an event that waits too long for its lambda. So this first wakes an inactive lambda, and
        waits for ACTIVE_SECONDS_MAX. It sends the event again only if AWS refused it. Raises `InstanceError`
        if the lambda does not become active.
        """
        state: LambdaState | None = None
        for _ in tries(ACTIVE_SECONDS_MAX, pause=ACTIVE_PAUSE_SECONDS):
            state = self.lambda_state(function)
            if state is None or state.is_active:
                try:
                    self._invoke(function, event, READ_SECONDS_MAX, InvocationType="Event")
                except AwsRefused as refused:
                    if refused.code not in INACTIVE_CODES | _THROTTLED:
                        raise
                else:
                    return
            elif state.is_idle:
                self.wake(function)
        raise InstanceError(
            f"the lambda {function} did not become active within {ACTIVE_SECONDS_MAX} seconds: it is {state}"
        )

    def lambda_state(self, function: str) -> LambdaState | None:
        """Returns the state of a lambda; None if it does not exist.

        Raises `InstanceError` for a lambda that cannot become active.
        """
        found = self.look("lambda", "get_function_configuration", FunctionName=function)
        if found is None:
            return None
        state = LambdaState(found.get("State", "Active"), " ".join(found.get("StateReason", "").split()))
        if state.name == "Failed":
            raise InstanceError(f"the lambda {function} is {state}; deploy it again")
        return state

    def wake(self, function: str) -> None:
        """Calls an inactive lambda. AWS refuses the call and begins to make the lambda active.

        An active lambda ignores the call.
        """
        try:
            self._invoke(function, WAKE, READ_SECONDS_MAX)
        except AwsRefused as refused:
            if refused.code not in INACTIVE_CODES:
                raise

    def _invoke(self, function: str, event: Mapping[str, Any], seconds_max: float, **given: Any) -> Any:
        with _clear("lambda", "invoke"):
            client = self._new_client("lambda", read_timeout=seconds_max, attempts_max=1)
            answer = client.invoke(FunctionName=function, Payload=json.dumps(event).encode(), **given)
            said = json.loads(answer["Payload"].read() or "null")
        if "FunctionError" in answer:
            why = said.get("errorMessage", "it gave no reason")
            raise InstanceError(f"the lambda {function} failed: {why}")
        return said

    def newest(self, metrics: Mapping[str, Metric], within: timedelta) -> dict[str, float]:
        """Returns the newest values of metrics by their names, without those that CloudWatch lacks.

        Returns an empty dictionary without the right to read CloudWatch.
        """
        now = datetime.now(UTC)
        queries = [{"Id": name, "MetricStat": metric.query()} for name, metric in metrics.items()]
        given = {"MetricDataQueries": queries, "StartTime": now - within, "EndTime": now}
        try:
            found = self.call("cloudwatch", "get_metric_data", ScanBy="TimestampDescending", **given)
        except InstanceError:
            return {}
        return {one["Id"]: float(one["Values"][0]) for one in found["MetricDataResults"] if one["Values"]}

    def parameter(self, name: str) -> str | None:
        """Returns the value of an SSM parameter, or None if it does not exist."""
        found = self.look("ssm", "get_parameter", Name=name)
        return None if found is None else str(found["Parameter"]["Value"])

    @property
    def region(self) -> str:
        with _clear("ssm", "get_parameter"):
            return str(self._client("ssm").meta.region_name)

    def of_region(self, region: str) -> Aws:
        """Returns a client for the same account in another region."""
        return Aws(self._session, region)

    @cached_property
    def account(self) -> str:
        return str(self.call("sts", "get_caller_identity")["Account"])

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._new_client(service, READ_SECONDS_MAX, ATTEMPTS_MAX)
        return self._clients[service]

    def _new_client(self, service: str, read_timeout: float, attempts_max: int) -> Any:
        from botocore.config import Config

        config = Config(
            retries={"mode": "standard", "total_max_attempts": attempts_max},
            connect_timeout=CONNECT_SECONDS_MAX,
            read_timeout=read_timeout,
            tcp_keepalive=True,  # network devices may drop a connection that is silent for minutes
        )
        return self._session.client(service, region_name=self._region, config=config)


def open_session(region: str | None = None, profile: str | None = None) -> Any:
    """Returns a boto3 session. Without arguments, AWS's usual files and environment variables decide.

    The region can also come from the variable AWS_REGION, which boto3 does not read.
    """
    try:
        import boto3
    except ImportError:
        raise not_installed("boto3", "aws") from None
    with _clear("sts", "get_caller_identity"):
        region = region or (None if profile else environment().get("AWS_REGION"))
        return boto3.session.Session(region_name=region, profile_name=profile)


def has_credentials() -> bool:
    """Returns whether boto3 is installed and finds credentials."""
    try:
        return open_session().get_credentials() is not None
    except InvalidInput:  # for example for an unknown profile
        return True
    except DormouseError:  # for example without boto3
        return False


def action(service: str, operation: str) -> str:
    """Returns the IAM action of an operation, such as `rds:StopDBCluster`."""
    words = "".join("DB" if word == "db" else word.capitalize() for word in operation.split("_"))
    return _ACTIONS.get((service, operation), f"{_PREFIXES.get(service, service)}:{words}")


@contextmanager
def _clear(service: str, operation: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise _refusal(error, action(service, operation)) from error
    except BotoCoreError as error:
        raise _problem(error, service) from error
    except ResponseParserError as error:
        raise InstanceError(
            f"the answer for {service} did not come from AWS: check the network, its proxy, and "
            f"AWS_ENDPOINT_URL"
        ) from error


def _refusal(error: Any, wanted: str) -> InstanceError:
    code, said = error.response["Error"]["Code"], " ".join(error.response["Error"].get("Message", "").split())
    if code in _EXPIRED:
        return InstanceError("the AWS credentials have expired: log in again (aws sso login), or renew them")
    if code in _UNKNOWN:
        return InstanceError(f"AWS does not know these credentials: check AWS_PROFILE or --profile ({said})")
    if code in _DENIED:
        found = re.search(r"perform: (\S+:\w+)(?: on resource: (\S+))?", said)
        what = found[1] if found else wanted
        on = f" on {found[2]}" if found and found[2] else ""
        return AwsRefused(
            code,
            f"the AWS credentials have no right to {what}{on}: ask for it, or use other credentials",
        )
    if code in _THROTTLED:
        return AwsRefused(code, f"AWS limits the rate of {wanted}: try again in a minute")
    return AwsRefused(code, f"AWS refuses {wanted}: {said or code}")


_PROBLEMS: dict[str, tuple[type[InstanceError | InvalidInput], str]] = {
    "NoRegionError": (InvalidInput, "no AWS region is given: use --region, or set AWS_REGION"),
    "InvalidRegionError": (InvalidInput, "{} Use one like eu-west-1"),
    "ProfileNotFound": (InvalidInput, "{}: see 'aws configure list-profiles'"),
    "(NoCredentials|PartialCredentials)Error": (
        InstanceError,
        "there are no AWS credentials: log in, set AWS_PROFILE, or give --profile",
    ),
    "(EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed)Error": (
        InstanceError,
        "AWS cannot be reached, check the region and the network: {}",
    ),
    ".*(Credential|Token|SSO|Login).*": (
        InstanceError,
        "no AWS credentials could be obtained, log in again: {}",
    ),
}
"""The error and message for each exception of botocore, by a pattern for its class; the first match
counts."""


def _problem(error: Any, service: str) -> Exception:
    said = " ".join(str(error).split())
    for pattern, (kind, words) in _PROBLEMS.items():
        if re.fullmatch(pattern, type(error).__name__):
            return kind(words.format(said))
    return InstanceError(f"a request to {service} failed: {said}")
