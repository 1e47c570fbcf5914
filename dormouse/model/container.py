"""A table as a container of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class _Read(Protocol):
    def count(self) -> int: ...

    def query(self) -> pa.RecordBatchReader: ...


class Container:
    """A table as a container of its rows, for `len`, truth, and what takes Arrow's streams."""

    def __len__(self: _Read) -> int:
        """Returns how many rows there are; see `count`."""
        return self.count()

    def __bool__(self) -> bool:
        return True  # without a count

    def __arrow_c_stream__(self: _Read, requested_schema: Any = None) -> Any:
        """Gives the rows to what takes Arrow's streams, like `pa.table(table)`."""
        return self.query().__arrow_c_stream__(requested_schema)
