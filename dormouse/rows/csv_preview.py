"""A preview of a CSV file: the columns that a table for it would have, and its first rows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.errors import InvalidColumn, InvalidData, InvalidRow
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.rows.columns import COLUMNS_MAX, SIZE_DEFAULT, SIZE_MAX, Column, ColumnType, check_column_name
from dormouse.rows.values import of_text
from dormouse.sources.text_format import TextFormat
from dormouse.sources.text_reader import TextBatch, TextFile, naming

LOOK_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of a file that a preview reads, unless it reads the whole file."""

ROWS_SHOWN = 10
SHOWN_CHARACTERS_MAX = 1_000
"""The most characters of a cell that a preview shows."""

SHOWN_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of the shown rows together. A preview of large rows shows fewer rows."""

NAME_CHARACTERS_MAX = 100
SIZES = (SIZE_DEFAULT, 100, 250, 500, SIZE_MAX)
_KEYS = (ROW_ID, ROW_VERSION)
_LIKE: tuple[tuple[ColumnType, str], ...] = (
    ("BOOLEAN", r"^(?i)(true|false)$"),
    # a code that begins with 0 is text: as a number it would lose the 0
    ("INTEGER", r"^\s*[+-]?(0|[1-9]\d*)\s*$"),
    # excludes whole numbers of more than 15 digits, because a double may lose some of the digits
    ("DOUBLE", r"^\s*[+-]?(0\s*$|0[.eE]|[1-9]\d{0,14}\s*$|[1-9]\d*[.eE]|[^\d\s])"),
    # excludes times finer than milliseconds, because a DATE would lose the rest
    ("DATE", r"^\d{4}-\d\d-\d\d[^.,]*([.,]\d{0,3}0*(\D.*)?)?$"),
    ("JSON", r"^\s*[\[{]"),
)
"""The types that a preview can guess, each with a pattern of its values. Narrow types come first.

If all values of a column match a pattern, the preview tries to convert them to the type. If no type fits, the
column is a STRING.
"""


@dataclass(frozen=True, slots=True)
class CsvPreview:
    """The guessed columns of a file, its first rows as texts, and the number of rows that were read.

    `columns` has the file's columns in order, without ROW_ID and ROW_VERSION. `rows` has all cells of the
    first rows, with None for empty cells. `row_count` is the number of rows that were read. If `is_whole` is
    True, these are all rows of the file.
    """

    columns: tuple[Column, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    row_count: int
    is_whole: bool
    has_row_ids: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the preview as a JSON object."""
        return {**asdict(self), "columns": [column.to_json() for column in self.columns]}


def preview_csv(
    path: str | PathLike[str],
    how: TextFormat,
    *,
    rows: int = ROWS_SHOWN,
    whole: bool = False,
    name: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> CsvPreview:
    """Returns a preview of the first 64 MiB of a file, or with `whole` of the whole file.

    - Each column gets the narrowest type that all its values fit.
    - The names of columns are changed where needed, so that they are unique and valid.
    - Long cells are cut.

    Error messages call the file `name`. `check` is called repeatedly, and may raise to stop the preview.
    Raises `InvalidData`, which names the row, for a row with too many or too few cells and for a text that is
    too long for a column.
    """
    from dormouse.sources.sniffing import other_format  # the client, which lacks numpy, has this module too

    with naming(fspath(path), name or f"file {fspath(path)!r}"):
        file = TextFile(path, how)
        if (other := other_format(file)) is not None:
            file = TextFile(path, other)
        names = _names(file) if file.width <= COLUMNS_MAX + len(_KEYS) else []
        keys = [number for number, name in enumerate(names) if name in _KEYS]
        if (width := file.width - len(keys)) > COLUMNS_MAX:
            raise InvalidData(f"has {width:,} columns; a row table has at most {COLUMNS_MAX}")
        guesses = [_Guess(name) for name in names]
        shown = _Shown(rows)
        count, is_whole = 0, True
        for batch in file.batches(width_min=2 if keys == [0, 1] else None):
            if count and not whole and batch.bytes_read > LOOK_BYTES_MAX:
                is_whole = False
                break
            shown.add(batch)
            count += batch.num_rows
            for guess, texts in zip(guesses, batch.columns, strict=False):
                check()
                guess.look(texts, batch, file)
    columns = tuple(guess.column() for number, guess in enumerate(guesses) if number not in keys)
    return CsvPreview(columns, tuple(names), tuple(shown.rows), count, is_whole, bool(keys))


class _Shown:
    """The first rows of a preview, up to a number of rows and of bytes."""

    def __init__(self, rows_max: int) -> None:
        self.rows: list[tuple[str | None, ...]] = []
        self._left = rows_max
        self._bytes_left = SHOWN_BYTES_MAX

    def add(self, batch: TextBatch) -> None:
        for row in _first(batch, self._left):
            self._bytes_left -= sum(4 * len(text) for text in row if text is not None)
            if self._bytes_left < 0:
                self._left = 0
                return
            self._left -= 1
            self.rows.append(row)


def _first(batch: TextBatch, count: int) -> Iterator[tuple[str | None, ...]]:
    if count <= 0:
        return iter(())
    ends = {True: "…", False: "", None: ""}
    cut = [
        [
            None if text is None else text + ends[is_long]
            for text, is_long in zip(
                pc.utf8_slice_codeunits(column, 0, SHOWN_CHARACTERS_MAX).to_pylist(),
                pc.greater(pc.utf8_length(column), SHOWN_CHARACTERS_MAX).to_pylist(),
                strict=True,
            )
        ]
        for column in (column.slice(0, count) for column in batch.columns)
    ]
    return zip(*cut, strict=True)


def _names(file: TextFile) -> list[str]:
    """Returns a valid, unique column name for each cell of a row, close to the name in the header."""
    given = file.header or ("",) * file.width
    names: list[str] = []
    taken: set[str] = set()
    for number, name in enumerate(given, 1):
        key = name.strip().upper()
        if key in _KEYS and key not in names:
            names.append(key)
            taken.add(key.casefold())
            continue
        valid = _valid_name(name, number)
        candidates = (valid, *(f"{valid}_{n}" for n in range(2, file.width + 2)))
        names.append(next(candidate for candidate in candidates if candidate.casefold() not in taken))
        taken.add(names[-1].casefold())
    return names


def _valid_name(name: str, number: int) -> str:
    """Returns a valid column name close to the given name, or else a name with the column's number."""
    words = (
        re.sub(r"\W+", "_", unicodedata.normalize("NFC", name)).strip("_")[:NAME_CHARACTERS_MAX].strip("_")
    )
    for candidate in (words, f"c_{words}") if words else ():
        try:
            check_column_name(candidate)
        except InvalidColumn:
            continue
        return candidate
    return f"column_{number}"


class _Guess:
    """A guess of a column's type. Each batch of values excludes types that do not fit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._left = list(_LIKE)
        self._longest = 0
        self._has_values = False

    def look(self, texts: pa.Array, batch: TextBatch, file: TextFile) -> None:
        values = pc.drop_null(texts).filter(pc.not_equal(pc.drop_null(texts), ""))
        if not len(values):
            return
        self._has_values = True
        self._left = [(kind, pattern) for kind, pattern in self._left if _are(values, kind, pattern)]
        self._longest = max(self._longest, pc.max(pc.utf8_length(values)).as_py())
        if self._longest > SIZE_MAX and not self._left:
            long = pc.greater(pc.utf8_length(texts), SIZE_MAX)
            if pc.any(long).as_py():
                at = pc.index(long, True).as_py()
                size = pc.utf8_length(texts[at]).as_py()
                raise file.refused(
                    batch.first_row + at,
                    f"column {self.name!r} has {size:,} characters, and a STRING may have {SIZE_MAX:,}",
                    column=self.name,
                )
            raise InvalidData(f"column {self.name!r} has texts longer than {SIZE_MAX:,} characters")

    def column(self) -> Column:
        if self._left and self._has_values:
            return Column(self.name, self._left[0][0])
        return Column(self.name, "STRING", next(size for size in SIZES if size >= self._longest))


def _are(values: pa.Array, kind: ColumnType, pattern: str) -> bool:
    """Returns whether all values are of a type."""
    if not pc.all(pc.match_substring_regex(values, pattern)).as_py():
        return False
    try:
        of_text(Column("guessed", kind), values)
    except InvalidRow:
        return False
    return True
