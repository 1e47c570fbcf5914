"""What the lambdas share: environments, structured logs, metrics, traces, and the database for a call."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from aws_lambda_powertools import Logger, Tracer
from aws_lambda_powertools.metrics.provider.cloudwatch_emf.cloudwatch import AmazonCloudWatchEMFProvider

from dormouse.backoff import backoff_seconds
from dormouse.durability.ownership import Ownership
from dormouse.errors import DormouseError, InstanceError, InvalidInput
from dormouse.objects import ObjectStore
from dormouse.objects.guarded import GuardedStore
from dormouse.postgres import ConnectionSupplier
from dormouse.settings.lambdas import DatabaseEnvironment, Environment, load_environment
from dormouse.settings.metrics import DIMENSION, NAMESPACE, UNITS

CONNECTIONS_MAX = 2
MARGIN_SECONDS = 20.0
"""Of the time that a lambda has, what it keeps to end in order."""

tracer = Tracer(service="dormouse", auto_patch=False)
logger = logging.getLogger("dormouse.lambdas")
E = TypeVar("E", bound=Environment)


@dataclass(frozen=True)
class Call(Generic[E]):
    """One call of a lambda."""

    name: str
    environment: E
    seconds_left: Callable[[], float]
    """Until it must begin to end."""
    _metrics: AmazonCloudWatchEMFProvider

    def count(self, **values: float) -> None:
        """Adds to metrics of dormouse.settings.metrics, by their names."""
        for name, value in values.items():
            self._metrics.add_metric(name=name, unit=UNITS.get(name, "Count"), value=value)


@contextmanager
def called(model: type[E], name: str, context: Any) -> Iterator[Call[E]]:
    """A call of the lambda `name`; what goes wrong is one line of the log, and raised."""
    environment = load_environment(model)
    metrics = AmazonCloudWatchEMFProvider(
        namespace=NAMESPACE, default_dimensions={DIMENSION: environment.instance_id}
    )
    metrics.service = None  # type: ignore[assignment]  # it would be a dimension
    _log_as_json(environment, name, context)
    try:
        yield Call(name, environment, _clock_of(context), metrics)
    except DormouseError as error:
        logger.error("%s: %s", type(error).__name__, error)  # noqa: TRY400  # it is the line, not the traceback
        raise
    finally:
        if metrics.metric_set:
            metrics.flush_metrics()


@contextmanager
def database(
    call: Call[Any], objects: ObjectStore, **limits_ms: int
) -> Iterator[tuple[ConnectionSupplier, ObjectStore]]:
    """Connections that end with the call, so that an idle database can pause; one that wakes is awaited.

    And the store, in which nothing is deleted unless the database owns it. `limits_ms` as in
    `ConnectionSupplier.limited`. Raises `InstanceIsACopy` and `InstanceTakenOver`.
    """
    environment: DatabaseEnvironment = call.environment
    name, seconds = f"dormouse-{call.name}", environment.connect_seconds_max
    with connections(environment.dsn, name, seconds, **limits_ms) as supplier:
        ownership = Ownership(supplier, objects)
        ownership.check()
        yield supplier, GuardedStore(objects, ownership.deleting)


@contextmanager
def connections(
    dsn: str, application_name: str, wait_seconds: float, **limits_ms: int
) -> Iterator[ConnectionSupplier]:
    """Connections to a database that answers within that time; raises InstanceError when it does not."""
    supplier = ConnectionSupplier(
        dsn, connections_max=CONNECTIONS_MAX, application_name=application_name, wait_seconds_max=wait_seconds
    ).limited(**limits_ms)
    try:
        _wait_for(supplier, time.monotonic() + wait_seconds)
        yield supplier
    finally:
        supplier.close()


def _wait_for(supplier: ConnectionSupplier, deadline: float) -> None:
    for attempt in count(1):
        try:
            with supplier.connection():
                return
        except InvalidInput:
            raise
        except InstanceError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            logger.info("attempt %d: %s", attempt, error)
            time.sleep(min(backoff_seconds(attempt), left))


def _clock_of(context: Any) -> Callable[[], float]:
    if context is None:
        return lambda: math.inf
    return lambda: float(context.get_remaining_time_in_millis()) / 1_000 - MARGIN_SECONDS


def _log_as_json(environment: Environment, name: str, context: Any) -> None:
    """In AWS, all that Dormouse logs; elsewhere the caller configures the logs."""
    if environment.function_name is None:
        return
    json_logger = Logger(service="dormouse")
    keys = {"function": name, DIMENSION: environment.instance_id}
    if request_id := getattr(context, "aws_request_id", None):
        keys["request_id"] = request_id
    json_logger.append_keys(**keys)
