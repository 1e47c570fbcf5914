"""The verbs: their registry, and the interfaces that are derived from it."""

from __future__ import annotations

from dormouse.verbs import rows, tables
from dormouse.verbs.jobs import VERBS, check_request, functions
from dormouse.verbs.rows import start_query
from dormouse.verbs.verb import (
    Call,
    Document,
    Form,
    Http,
    Job,
    OfWire,
    Request,
    Verb,
    fields_of,
    json_of,
    options,
)

__all__ = [
    "VERBS",
    "Call",
    "Document",
    "Form",
    "Http",
    "Job",
    "OfWire",
    "Request",
    "Verb",
    "check_request",
    "fields_of",
    "functions",
    "json_of",
    "options",
    "rows",
    "start_query",
    "tables",
]
