"""Answers as users hold them: a stream of batches that other libraries take in one call."""

from __future__ import annotations

from typing import Any, Self

import pyarrow as pa

from dormouse.reading.streams import Frames, shown_reader


class Answer(Frames):
    """A `pyarrow.RecordBatchReader`, with `arrow()`, `df()` and `pl()` for all of its rows.

    Arrow makes no readers of other classes than its own: this one passes on what it
    is asked, and counts as one for `isinstance`.
    """

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return pa.RecordBatchReader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._reader)})

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return shown_reader(self._reader.schema)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
