"""How CSV is written: the options that every door has, and what was found of one file."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from dormouse.errors import InvalidInput
from dormouse.objects.names import COMPRESSIONS

UTF_8 = "utf-8"
SKIP_LINES_MAX = 10_000
NAMED_SEPARATORS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}


class TextOptions(TypedDict, total=False):
    """The fields of a `TextFormat`, as calls of Python take them."""

    separator: str | None
    quote: str | None
    escape: str | None
    header: bool
    skip_lines: int
    null: str | Sequence[str] | None
    encoding: str


class TextFormat(BaseModel):
    """The format of a CSV file: RFC 4180 in UTF-8 unless another is said.

    What was said is in `model_fields_set`; of tables, the rest is found out. `text_format` makes one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    separator: str = ","
    """Between cells; tab for tabs. By default a comma, or a tab for .tsv and .tab."""
    quote: str | None = '"'
    """Around cells; '' for none."""
    escape: str | None = None
    """Before a quote or separator that is part of a cell; two quotes are one anyway."""
    header: bool = True
    """Whether the first row has the names of the columns."""
    skip_lines: int = 0
    """Lines before the header or the first row."""
    null: tuple[str, ...] = ()
    """A text that stands for null where it is not quoted, like NA. Repeatable."""
    encoding: str = UTF_8
    """Of the text, like latin-1."""

    @field_validator("separator", "quote", "escape", mode="before")
    @classmethod
    def _character(cls, given: Any, info: ValidationInfo) -> Any:
        if info.field_name == "separator":
            given = NAMED_SEPARATORS.get(str(given), given)
        elif given is None or (given == "" and info.field_name == "quote"):
            return None
        if not (isinstance(given, str) and len(given) == 1 and given.isascii()):
            raise ValueError(f"must be one ASCII character, not {given!r}")
        if given in "\r\n\0":
            raise ValueError(f"must not be {given!r}, which ends a row or is no text")
        return given

    @field_validator("header", mode="before")
    @classmethod
    def _truth(cls, given: Any) -> Any:
        if type(given) is not bool:
            raise ValueError(f"must be True or False, not {given!r}")
        return given

    @field_validator("skip_lines", mode="before")
    @classmethod
    def _count(cls, given: Any) -> Any:
        if type(given) is not int or not 0 <= given <= SKIP_LINES_MAX:
            raise ValueError(f"must be from 0 to {SKIP_LINES_MAX:,}, not {given!r}")
        return given

    @field_validator("null", mode="before")
    @classmethod
    def _texts(cls, given: Any) -> Any:
        texts = (given,) if isinstance(given, str) else given or ()
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) and one for one in texts):
            raise ValueError(f"must be a text, like NA, not {given!r}")
        return tuple(texts)

    @field_validator("encoding")
    @classmethod
    def _known(cls, given: str) -> str:
        try:
            "".encode(given)
        except LookupError:
            raise ValueError(f"{given!r} is not known, try latin-1 or utf-16") from None
        return UTF_8 if codecs.lookup(given).name == UTF_8 else given

    @model_validator(mode="after")
    def _differ(self) -> TextFormat:
        used = [one for one in (self.separator, self.quote, self.escape) if one is not None]
        if len(set(used)) < len(used):
            raise ValueError(f"separator, quote and escape must differ: {', '.join(map(repr, used))}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the options as a request of a job has them, which workers of earlier versions take.

        They know neither an encoding nor several texts for null.
        """
        given = {name: getattr(self, name) for name in TextFormat.model_fields}
        given["null"] = list(self.null) if len(self.null) > 1 else self.null[0] if self.null else None
        return given if self.encoding != UTF_8 else {k: v for k, v in given.items() if k != "encoding"}


USUAL = TextFormat()
HELP: Mapping[str, str] = {
    name: str(field.description).strip() for name, field in TextFormat.model_fields.items()
}
"""What each option is, in every door."""


def text_format(path: str | PathLike[str] | None = None, **given: Unpack[TextOptions]) -> TextFormat:
    """Returns the format of a file; `InvalidInput` names an option that cannot be.

    A name that ends with .tsv or .tab tells tabs, unless a separator is given.
    """
    if path is not None and given.get("separator") is None:
        given = {**given, "separator": "\t" if has_tabs(path) else ","}
    try:
        return TextFormat.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        where = " ".join(map(str, fault["loc"]))
        raise InvalidInput(f"{where} {fault['msg'].removeprefix('Value error, ')}".strip()) from None


def has_tabs(path: str | PathLike[str]) -> bool:
    """Returns whether the name of a file, which may be compressed, tells that tabs are between its cells."""
    suffixes = [suffix.lower() for suffix in Path(fspath(path)).suffixes]
    if suffixes and (suffixes[-1] in COMPRESSIONS or suffixes[-1] == ".zip"):
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in (".tsv", ".tab")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The format of one file of a table, as it was found.

    `names` are its columns, where they are others than the header has. `time_formats` are DuckDB's, as of
    strptime, of columns whose times are not as ISO 8601 has them. `absent` are columns of the table that the
    file lacks.
    """

    text: TextFormat = USUAL
    decimal_point: str = "."
    names: tuple[str, ...] = ()
    time_formats: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Names what is not as usual."""
        text, usual = self.text, USUAL
        shown = {
            "delimiter": None if text.separator == usual.separator else repr(text.separator),
            "quote": None if text.quote == usual.quote else repr(text.quote) if text.quote else "none",
            "no header": None if text.header else "",
            "lines before it": str(text.skip_lines) if text.skip_lines else None,
            "encoding": None if text.encoding == usual.encoding else text.encoding,
            "null": ", ".join(text.null) or None,
            "decimal point": None if self.decimal_point == "." else repr(self.decimal_point),
            **{f"times of {name!r}": how for name, how in self.time_formats},
        }
        return "; ".join(f"{name} {how}".strip() for name, how in shown.items() if how is not None)
