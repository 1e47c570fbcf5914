"""The number of requests to S3 that a look-up makes when the file's footer is cached."""

from __future__ import annotations

import random

import dormouse as dm
from benchmarks.harness.command import Figures
from benchmarks.harness.counting_s3 import counting_s3
from benchmarks.harness.place import Place
from benchmarks.query.lake import KEY_STEP, SCHEMA, rows_of

ROWS = 200_000
LOOKUPS = 20


def requests_of_a_lookup(place: Place) -> Figures:
    """Returns the largest numbers of HEAD and GET requests of a warm look-up in a table of one file."""
    dsn = place.create_database("far")
    chance = random.Random(1)
    with counting_s3() as s3, dm.connect(dsn, s3.objects) as instance:
        table = instance.create_table("orders", SCHEMA)
        table.ingest(rows_of(ROWS, 1, 0), engine="local")
        for _ in range(LOOKUPS):  # caches the index of every row group
            _look_up(table, chance)
        s3.taken()
        counted = []
        for _ in range(LOOKUPS):
            _look_up(table, chance)
            counted.append(s3.taken())
    return {
        f"{method.lower()}_requests": max(requests[method] for requests in counted)
        for method in ("HEAD", "GET")
    }


def _look_up(table: dm.Table, chance: random.Random) -> None:
    answer = table.query({"key": chance.randrange(ROWS) * KEY_STEP}).read_all()
    if answer.num_rows != 1:
        raise RuntimeError(f"{answer.num_rows} rows instead of one")
