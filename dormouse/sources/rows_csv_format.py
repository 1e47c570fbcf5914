"""How a CSV file is written: its separator, its quotes, whether it has a header."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, TypedDict, Unpack

from dormouse.data.export import format_of_name
from dormouse.errors import InvalidInput

NAMED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
SKIP_LINES_MAX = 10_000


class CsvOptions(TypedDict, total=False):
    """The fields of a `CsvFormat`."""

    separator: str | None
    quote: str | None
    escape: str | None
    header: bool
    skip_lines: int
    null: str | None


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """RFC 4180 unless it is said otherwise. `InvalidInput` names what cannot be.

    `escape` is a character before a quote, a separator or itself; two quotes in a row are one quote anyway.
    `skip_lines` are lines before the header, or before the first row where there is no header. `null` is
    a text that stands for nothing, like NA, where it is not quoted; a cell without anything does anyway.
    """

    separator: str = ","
    quote: str | None = '"'
    escape: str | None = None
    header: bool = True
    skip_lines: int = 0
    null: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "separator", NAMED.get(str(self.separator), self.separator))
        given = {"separator": self.separator, "quote": self.quote, "escape": self.escape}
        for name, character in given.items():
            if character is None and name != "separator":
                continue
            if not (isinstance(character, str) and len(character) == 1 and character.isascii()):
                raise InvalidInput(f"{name} must be one ASCII character, not {character!r}")
            if character in "\r\n\0":
                raise InvalidInput(f"{name} must not be {character!r}, which ends a row or is no text")
        used = [character for character in given.values() if character is not None]
        if len(set(used)) < len(used):
            raise InvalidInput(f"separator, quote and escape must differ: {', '.join(map(repr, used))}")
        if type(self.header) is not bool:
            raise InvalidInput(f"header must be True or False, not {self.header!r}")
        if type(self.skip_lines) is not int or not 0 <= self.skip_lines <= SKIP_LINES_MAX:
            raise InvalidInput(f"skip_lines must be from 0 to {SKIP_LINES_MAX:,}, not {self.skip_lines!r}")
        if self.null is not None and (not isinstance(self.null, str) or not self.null):
            raise InvalidInput(f"null must be a text, like NA, not {self.null!r}")

    @classmethod
    def like(cls, given: Any) -> CsvFormat:
        """That of something which has all of its fields."""
        return cls(**{field.name: getattr(given, field.name) for field in fields(cls)})

    @classmethod
    def of_file(cls, path: str | PathLike[str], **given: Unpack[CsvOptions]) -> CsvFormat:
        """With the separator that a file's name tells (tabs of .tsv and .tab), unless one is given."""
        if given.get("separator") is None:
            given["separator"] = "\t" if format_of_name(path) == "tsv" else ","
        return cls(**given)  # type: ignore[arg-type]
