"""A look into a CSV file: which columns a table for it would have, and its first rows."""

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
"""Of a file, unless all of it is wanted."""

ROWS_SHOWN = 10
SHOWN_CHARACTERS_MAX = 1_000
"""The characters of a cell that a preview shows."""

SHOWN_BYTES_MAX = 4 * 1024 * 1024
"""The size of all rows that a preview shows; larger rows make them fewer."""

NAME_CHARACTERS_MAX = 100
SIZES = (SIZE_DEFAULT, 100, 250, 500, SIZE_MAX)
_KEYS = (ROW_ID, ROW_VERSION)
_LIKE: tuple[tuple[ColumnType, str], ...] = (
    ("BOOLEAN", r"^(?i)(true|false)$"),
    # a code that begins with 0 is text, as a number would lose it
    ("INTEGER", r"^\s*[+-]?(0|[1-9]\d*)\s*$"),
    # no whole number of more than 15 digits, of which a double may lose some
    ("DOUBLE", r"^\s*[+-]?(0\s*$|0[.eE]|[1-9]\d{0,14}\s*$|[1-9]\d*[.eE]|[^\d\s])"),
    # no time finer than the milliseconds that a DATE has
    ("DATE", r"^\d{4}-\d\d-\d\d[^.,]*([.,]\d{0,3}0*(\D.*)?)?$"),
    ("JSON", r"^\s*[\[{]"),
)
"""From the narrowest; values of a type look like this, and are then tried as such. All others are texts."""


@dataclass(frozen=True, slots=True)
class CsvPreview:
    """What a file seems to hold: columns for a table, its first rows as texts, and how much was looked at.

    `columns` are those of the file without ROW_ID and ROW_VERSION, in its order. `rows` have all cells of
    the file, None where there is nothing. `row_count` is of the rows that were looked at: of all when
    `is_whole`.
    """

    columns: tuple[Column, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    row_count: int
    is_whole: bool
    has_row_ids: bool

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
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
    """Looks at the first 64 MB of a file, or at the whole of it.

    Types are the narrowest that all values have; names are made unique, and such as a column may have. `name`
    is what the file is called in errors. `check` is called again and again; what it raises ends the look.
    Long cells are shown cut. Raises `InvalidData`, which names the row: of too many cells or too
    few, or with a text longer than a column can hold.
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
    """The first rows, as far as they are small enough to be shown."""

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
    """A name for each cell: the header's, mended and numbered where two columns of a table must differ."""
    given = file.header or ("",) * file.width
    found: list[str] = []
    taken: set[str] = set()
    for number, name in enumerate(given, 1):
        key = name.strip().upper()
        if key in _KEYS and key not in found:
            found.append(key)
            taken.add(key.casefold())
            continue
        mended = _mended(name, number)
        candidates = (mended, *(f"{mended}_{n}" for n in range(2, file.width + 2)))
        found.append(next(one for one in candidates if one.casefold() not in taken))
        taken.add(found[-1].casefold())
    return found


def _mended(name: str, number: int) -> str:
    """The nearest that a column may be called; by its number if there is none."""
    found = (
        re.sub(r"\W+", "_", unicodedata.normalize("NFC", name)).strip("_")[:NAME_CHARACTERS_MAX].strip("_")
    )
    for candidate in (found, f"c_{found}") if found else ():
        try:
            check_column_name(candidate)
        except InvalidColumn:
            continue
        return candidate
    return f"column_{number}"


class _Guess:
    """What a column may be, as its values are seen."""

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
        self._left = [one for one in self._left if _are(values, *one)]
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
    """Whether all are of a type."""
    if not pc.all(pc.match_substring_regex(values, pattern)).as_py():
        return False
    try:
        of_text(Column("guessed", kind), values)
    except InvalidRow:
        return False
    return True
