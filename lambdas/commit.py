"""Applies commit requests from SQS; the event source mapping must report batch item failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.commits import sqs_event
from dormouse.objects import open_store
from dormouse.postgres import OneShotConnectionSupplier
from dormouse.settings.lambdas import CommitEnvironment, load_environment


def handler(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Answers which records are to be delivered again. Keeps no connection: an idle database can pause."""
    settings = load_environment(CommitEnvironment)
    supplier = OneShotConnectionSupplier(settings.dsn, application_name="dormouse-commit")
    try:
        return sqs_event.handle(event, supplier, open_store(settings.objects))
    finally:
        supplier.close()
