"""The services of all lambdas: environment, structured logs, metrics, traces.

They do not use the database.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar, cast

from aws_lambda_powertools import Logger, Tracer
from aws_lambda_powertools.metrics.provider.cloudwatch_emf.cloudwatch import AmazonCloudWatchEMFProvider

from dormouse.errors import DormouseError
from dormouse.settings.lambdas import DIMENSION, NAMESPACE, UNITS, Environment, load_environment
from dormouse.settings.section import WAKE

MARGIN_SECONDS = 20.0
"""The time that a lambda reserves before its timeout, in order to finish its work."""

tracer = Tracer(service="dormouse", auto_patch=False)
logger = logging.getLogger("dormouse.lambdas")
E = TypeVar("E", bound=Environment)
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call(Generic[E]):
    """One call of a lambda, with its environment, its time limit and its metrics."""

    name: str
    environment: E
    seconds_left: Callable[[], float]
    """A function that returns the seconds until the lambda must begin to finish."""
    _metrics: AmazonCloudWatchEMFProvider

    def count(self, **values: float) -> None:
        """Adds values to metrics. The names of the metrics are constants in dormouse.settings.lambdas."""
        for name, value in values.items():
            self._metrics.add_metric(name=name, unit=UNITS.get(name, "Count"), value=value)


def wakeable(handler: Handler) -> Handler:
    """Returns a handler that ignores calls that only make the lambda active."""

    @wraps(handler)
    def ignores(event: Any, context: Any) -> Any:
        return None if event == WAKE else handler(event, context)

    return cast(Handler, ignores)


@contextmanager
def called(model: type[E], name: str, context: Any) -> Iterator[Call[E]]:
    """Yields a call of the lambda `name`, and sends its metrics at the end.

    An error of Dormouse is logged in one line and raised.
    """
    environment = load_environment(model)
    metrics = AmazonCloudWatchEMFProvider(
        namespace=NAMESPACE, default_dimensions={DIMENSION: environment.instance_id}
    )
    metrics.service = None  # type: ignore[assignment]  # it would be a dimension
    _log_as_json(environment, name, context)
    try:
        yield Call(name, environment, _clock_of(context), metrics)
    except DormouseError as error:
        logger.error("%s: %s", type(error).__name__, error)  # noqa: TRY400  # one line, without a traceback
        raise
    finally:
        if metrics.metric_set:
            metrics.flush_metrics()


def _clock_of(context: Any) -> Callable[[], float]:
    if context is None:
        return lambda: math.inf
    return lambda: float(context.get_remaining_time_in_millis()) / 1_000 - MARGIN_SECONDS


def _log_as_json(environment: Environment, name: str, context: Any) -> None:
    """Configures JSON logs within AWS; elsewhere the caller configures the logs."""
    if environment.function_name is None:
        return
    json_logger = Logger(service="dormouse")
    keys = {"function": name, DIMENSION: environment.instance_id}
    if request_id := getattr(context, "aws_request_id", None):
        keys["request_id"] = request_id
    json_logger.append_keys(**keys)
