"""Answers as DataFrames of other libraries, where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dormouse.errors import InvalidQuery, not_installed
from dormouse.model.text import COLUMNS_SHOWN, shown_list

if TYPE_CHECKING:
    import pyarrow as pa


class Frames:
    """All rows of a reader, in one call; each row of a reader is read once."""

    def arrow(self) -> pa.Table:
        """Returns the rows as a table of Arrow."""
        reader: pa.RecordBatchReader = self
        return reader.read_all()

    def df(self) -> Any:
        """Returns the rows as a DataFrame of pandas; raises `DependencyMissing`."""
        return pandas_of(lambda: self)

    def pl(self) -> Any:
        """Returns the rows as a DataFrame of Polars; raises `DependencyMissing`."""
        return polars_of(lambda: self)


def shown_reader(schema: pa.Schema) -> str:
    """Returns how a reader shows itself: its columns, and how its rows are read."""
    named = shown_list([f"{field.name} {field.type}" for field in schema], COLUMNS_SHOWN)
    return f"Answer({named}; a reader, whose rows are read once: by batches, arrow(), df() or pl())"


def pandas_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """All rows of an answer; `DependencyMissing` before it is asked for."""
    if find_spec("pandas") is None:
        raise not_installed("pandas", "pandas")
    return ask().read_all().to_pandas()


def polars_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """As `pandas_of`."""
    try:
        import polars
    except ImportError:
        raise not_installed("polars", "polars") from None
    reader = ask()
    for field in reader.schema:
        if _has_intervals(field.type):
            raise InvalidQuery(
                f"column {field.name!r} has intervals, which Polars does not have: cast it to VARCHAR, or "
                "take arrow() or df()"
            )
    return polars.from_arrow(reader.read_all())


def _has_intervals(kind: pa.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return str(kind) == "month_day_nano_interval" or any(map(_has_intervals, inner))
