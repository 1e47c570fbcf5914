"""The verbs that load rows into a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dormouse.errors import DormouseError, InvalidData, InvalidInput
from dormouse.model.reshaping import Evolve
from dormouse.model.table import Engine
from dormouse.objects.names import INCOMING, check_name, hiding, without_paths
from dormouse.verbs.verb import Call, Job, OfTable, Verb, options

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.jobs.runs import Progress
    from dormouse.objects.store import ObjectStore

OBJECTS_MAX = 10_000


class LoadRequest(OfTable):
    """A request to load rows from any source."""

    ingest_id: str | None = None
    """An id of your choice for this load; loading again with the same id adds nothing."""

    engine: Engine = "auto"
    """The engine that sorts and writes the rows; auto: Spark if it has a cluster and the load is large, else
    this process."""

    evolve: Evolve | None = None
    """The treatment of columns that the table lacks: add adds them first; by default they are refused."""


class IngestRequest(LoadRequest):
    """Add rows in one commit: all of them, or none."""

    objects: list[str] = Field(min_length=1, max_length=OBJECTS_MAX)
    """Names of objects in the instance's own store, below incoming/."""


def _ingest(instance: Instance, request: IngestRequest, call: Call) -> Any:
    table, job = instance.table(request.table), call.its_job
    objects, given = instance.objects, options(request, "table", "objects")
    # a job that runs again because its worker died adds its rows once
    given["ingest_id"] = request.ingest_id or f"job:{job.job_id}"
    names = dict.fromkeys(request.objects)
    with _objects_named(objects) as paths, objects.pinned(_checked(names, job)) as files:
        paths.update({str(path): name for name, path in files.items()})
        return table.ingest([str(files[name]) for name in request.objects], **given, progress=job)


def _check_ingest(instance: Instance, request: IngestRequest, call: Call) -> None:
    instance.table(request.table)
    for name in request.objects:
        _check_object(name)


def _checked(names: Iterable[str], progress: Progress) -> Iterator[str]:
    for name in names:
        _check_object(name)
        progress.check()
        yield name


@contextmanager
def _objects_named(objects: ObjectStore) -> Iterator[dict[str, str]]:
    """Yields a dict, which the caller fills with the names of objects by their paths.

    Errors of the block of `with` then contain the names of objects instead of paths.
    """
    names: dict[str, str] = {}
    try:
        yield names
    except DormouseError as error:
        hide = hiding(objects.url)

        def named(text: str) -> str:
            for path, name in names.items():
                text = text.replace(path, name)
            return hide(text)

        error.args = tuple(named(str(one)) for one in error.args)
        error.data = without_paths(error.data, named)
        raise


def _check_object(name: str) -> None:
    check_name(name)
    if not name.startswith(f"{INCOMING}/"):
        raise InvalidInput(f"object {name!r} is not below {INCOMING}/: put there what is to be ingested")
    from dormouse.sources.data_files import KNOWN, kind_of

    if kind_of(Path(name)) is None:
        raise InvalidData(f"object {name!r} does not have a known suffix ({KNOWN})")


VERBS = (Verb("ingest", IngestRequest, _ingest, job=Job("ingest", check=_check_ingest), changes=True),)
