"""The verbs that keep a table in order: compaction, splits, and the indexes of row tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from dormouse.model.table import Engine
from dormouse.verbs.verb import Call, Job, OfTable, Verb, options

if TYPE_CHECKING:
    from dormouse.api.instance import Instance


class SplitRequest(OfTable):
    """Split leaves with too many rows, and move their files down by one level."""


class CompactRequest(OfTable):
    """Run one round of compaction: create the jobs that are due, and run them."""

    engine: Engine = "auto"
    """The engine that runs the jobs; auto: on Spark if it has a cluster, else in this process."""

    full: bool = False
    """Make each leaf one file without replaced or deleted rows, whatever the strategy. Rewrites all rows of
    leaves that have several files or such rows."""


class IndexRequest(OfTable):
    """Bring the index of a row table to its newest version."""

    columns: list[int] = Field(default_factory=list, max_length=100)
    """The ids of columns to index."""


def _compact(instance: Instance, request: CompactRequest, call: Call) -> Any:
    return instance.table(request.table).compact(**options(request, "table"), progress=call.progress)


def _split(instance: Instance, request: SplitRequest, call: Call) -> Any:
    return instance.table(request.table).split()


def _index(instance: Instance, request: IndexRequest, call: Call) -> Any:
    return instance.row_indexes.work(request.model_dump(), call.its_job)


VERBS = (
    Verb("compact", CompactRequest, _compact, job=Job("compact"), changes=True),
    Verb("split", SplitRequest, _split, job=Job("split"), changes=True),
    Verb("index rows", IndexRequest, _index, job=Job("index_rows"), changes=True),
    Verb("index row columns", IndexRequest, _index, job=Job("index_row_columns"), changes=True),
)
