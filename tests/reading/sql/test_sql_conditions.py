"""Values that are written as literals of DuckDB."""

from __future__ import annotations

from decimal import Decimal

import duckdb

from dormouse.reading.sql.conditions import literal
from tests.support.model import DECIMAL, Field


def test_decimals_of_any_precision_are_exact_literals() -> None:
    values = [
        (Field("x", DECIMAL(precision, scale)), Decimal((sign, digits, -scale)))
        for precision in range(1, 39)
        for scale in {0, precision // 2, precision - 1, precision}
        for digits in ((0,), (1,), (9,) * precision)
        for sign in (0, 1)
    ]
    statement = f"SELECT {', '.join(literal(field, value) for field, value in values)}"
    assert duckdb.sql(statement).fetchone() == tuple(value for _, value in values)
