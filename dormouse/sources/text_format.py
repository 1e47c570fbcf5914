"""The format of CSV files: the options that every door has, and the detected format of one file."""

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
    """The fields of a `TextFormat` as keyword arguments."""

    separator: str | None
    quote: str | None
    escape: str | None
    header: bool
    skip_lines: int
    null: str | Sequence[str] | None
    encoding: str


class TextFormat(BaseModel):
    """The format of a CSV file. By default it is RFC 4180 in UTF-8. `text_format` makes one.

    `model_fields_set` has the options that the caller gave. For tables, the other options are detected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    separator: str = ","
    """The character between cells, or `tab`. By default a comma, or a tab for .tsv and .tab."""
    quote: str | None = '"'
    """The character around cells; '' for none."""
    escape: str | None = None
    """The character before a quote or separator that is part of a cell. A doubled quote needs none."""
    header: bool = True
    """True if the first row has the names of the columns."""
    skip_lines: int = 0
    """The number of lines to skip before the header or the first row."""
    null: tuple[str, ...] = ()
    """A text that stands for null where it is not quoted, like NA. Repeatable."""
    encoding: str = UTF_8
    """The encoding of the text, like latin-1."""

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
            raise ValueError(f"must not be {given!r}: line ends and NUL cannot be used")
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
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
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
        used = [sign for sign in (self.separator, self.quote, self.escape) if sign is not None]
        if len(set(used)) < len(used):
            raise ValueError(f"separator, quote and escape must differ: {', '.join(map(repr, used))}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the options for the request of a job, in a form that workers of earlier versions accept.

        Those versions know neither an encoding nor several texts for null: these appear only if given.
        """
        given = {name: getattr(self, name) for name in TextFormat.model_fields}
        given["null"] = list(self.null) if len(self.null) > 1 else self.null[0] if self.null else None
        return given if self.encoding != UTF_8 else {k: v for k, v in given.items() if k != "encoding"}


USUAL = TextFormat()
HELP: Mapping[str, str] = {
    name: str(field.description).strip() for name, field in TextFormat.model_fields.items()
}
"""The help text of each option, for every door."""


def text_format(path: str | PathLike[str] | None = None, **given: Unpack[TextOptions]) -> TextFormat:
    """Returns the format with the given options. Raises `InvalidInput`, which names a wrong option.

    If no separator is given, it is a tab for a path that ends with .tsv or .tab, else a comma.
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
    """Returns whether a file name ends with .tsv or .tab, with or without a compression suffix."""
    suffixes = [suffix.lower() for suffix in Path(fspath(path)).suffixes]
    if suffixes and (suffixes[-1] in COMPRESSIONS or suffixes[-1] == ".zip"):
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in (".tsv", ".tab")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The known or detected format of one file of a table.

    - `names`: the names of its columns, if they differ from the header's; else empty.
    - `time_formats`: a strptime format of DuckDB for each column whose times are not in ISO 8601.
    - `absent`: the columns of the table that the file lacks.
    """

    text: TextFormat = USUAL
    decimal_point: str = "."
    names: tuple[str, ...] = ()
    time_formats: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns a description of the options that differ from the usual format."""
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
