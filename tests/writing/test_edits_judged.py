"""Random UPDATE, DELETE, MERGE and INSERT statements, with DuckDB on the same rows as the judge."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random, SystemRandom

import pytest

from tests.sql_edits import EditJudge, EditWriter, check
from tests.sql_fuzz import Compact, Lake, creations, steps
from tests.support.api import Instance

SEED = 59


def run(instance: Instance, seed: int, rounds: int, edits: int) -> Counter[str]:
    """Runs random histories with edits between; returns how many edits were made, and how many refused."""
    random, tally = Random(seed), Counter[str]()
    made = creations(random)
    lake, judge, writer = Lake(instance), EditJudge(made), EditWriter(random, made)
    for one in made:
        lake.do(one)
    todo = steps(random, [one for one in made if "filter" not in one.properties])
    for _ in range(rounds):
        # planning slows down with each deletion that is pending; some tables keep those of several rounds
        for one in made:
            if random.random() < 0.5:
                lake.do(Compact(one.table))
        for step in islice(todo, 8):
            lake.do(step)
        for _ in range(edits):
            edit = writer.edit()
            try:
                outcome = check(instance, lake, judge, edit, by_statement=random.random() < 0.5)
            except Exception as error:
                error.add_note(f"seed {seed}: {edit.text}")
                raise
            tally[outcome] += 1
    return tally


def test_edits_change_what_duckdb_changes(instance: Instance) -> None:
    tally = run(instance, SEED, rounds=2, edits=7)
    assert tally["made"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_many_edits_change_what_duckdb_changes(instance: Instance, number: int) -> None:
    tally = run(instance, SystemRandom().randrange(1 << 32), rounds=6, edits=40)
    assert tally["made"] > tally["refused"]
