"""Objects of jobs, their answers and what was sent for them: of which jobs they are, and which are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from uuid import UUID

from dormouse.objects.names import ANSWERS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

_OF_JOB = re.compile(rf"{ANSWERS}/([0-9a-f]{{32}})/")
_ANSWER = re.compile(rf"{ANSWERS}/[0-9a-f]{{32}}/\d+\.parquet")
_QUERIES = load(__file__, "job_objects")


def of_jobs(names: Sequence[str]) -> Mapping[str, UUID]:
    """Those of some names that are of a job, and of which; others are somebody else's."""
    return {name: UUID(found[1]) for name in names if (found := _OF_JOB.match(name))}


def is_answer(name: str) -> bool:
    """Whether an object is the answer of a job, and not what was sent for one."""
    return _ANSWER.fullmatch(name) is not None


def known(supplier: Supplier, names: Sequence[str]) -> set[str]:
    """Those of some names that are of a job which is there, whatever has become of it."""
    keys = of_jobs(names)
    work = rows_of(_QUERIES["known"], {"job_keys": list(set(keys.values()))})
    found = {key for (key,) in run_lookup(supplier, work, operation="look for jobs of objects")}
    return {name for name, key in keys.items() if key in found}
