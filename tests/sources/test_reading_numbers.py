"""Numbers in text files. They are read exactly, or refused with file, line, column and value."""

from __future__ import annotations

import random
from decimal import Context, Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidData
from dormouse.sources.text_values import UnfitText, value_column
from tests.support.model import DataType
from tests.support.writing import infer, open_source

K = dm.Field("k", dm.LONG)


def loaded(path: Any, kind: DataType) -> list[Any]:
    """Returns the values of a file's column `v`, read for a table whose column has the type."""
    source = open_source(path, dm.Schema([K], [], [dm.Field("v", kind, nullable=True)]))
    return [value for batch in source.batches for value in batch["v"].to_pylist()]


def written(path: Path, values: list[str]) -> str:
    """Writes a CSV or JSON file with one row for each value; returns its path."""
    if path.suffix == ".csv":
        path.write_text("k,v\n" + "".join(f"{k},{value}\n" for k, value in enumerate(values)))
    else:
        path.write_text("".join(f'{{"k": {k}, "v": {value}}}\n' for k, value in enumerate(values)))
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("kind", "fits", "other"),
    [
        (dm.DECIMAL(10, 2), "99999999.99", "9876543210"),
        (dm.DECIMAL(10, 2), "5e7", "1e9"),
        (dm.DECIMAL(10, 2), "-0.10", "100000000"),
        (dm.DECIMAL(10, 2), "1.5000", "1.505"),
        (dm.DECIMAL(5, 5), "0.5", "12345"),
        (dm.DECIMAL(38, 10), "1234567890123456789012345678", "12345678901234567890123456789012345678"),
        (dm.DECIMAL(38, 0), "9" * 38, "9" * 39),
    ],
)
def test_a_decimal_is_read_exactly_or_refused(
    tmp_path: Path, suffix: str, kind: DataType, fits: str, other: str
) -> None:
    assert loaded(written(tmp_path / f"a.{suffix}", [fits]), kind) == [Decimal(fits)]
    path = written(tmp_path / f"b.{suffix}", [fits, other])
    line = 3 if suffix == "csv" else 2
    with pytest.raises(InvalidData) as caught:
        loaded(path, kind)
    assert f"b.{suffix}', line {line}: column 'v' is '{other}', which does not fit {kind}" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
    assert (caught.value.data["line"], caught.value.data["column"]) == (line, "v")


@pytest.mark.slow
def test_a_decimal_that_does_not_fit_is_found_late_in_a_file(tmp_path: Path) -> None:
    values = ["1.25"] * 200_000 + ["9876543210"]
    with pytest.raises(InvalidData, match=r"line 200,002: column 'v' is '9876543210', which does not fit"):
        loaded(written(tmp_path / "a.csv", values), dm.DECIMAL(10, 2))


def test_decimals_are_read_with_a_decimal_comma(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("k;x;v\n1;0,5;1,5\n2;1,25; -99999999,99 \n3;2,5;\n")
    schema = dm.Schema(
        [K], [], [dm.Field("x", dm.DOUBLE, nullable=True), dm.Field("v", dm.DECIMAL(10, 2), nullable=True)]
    )
    found = [one for batch in open_source(str(path), schema).batches for one in batch["v"].to_pylist()]
    assert found == [Decimal("1.5"), Decimal("-99999999.99"), None]
    path.write_text("k;x;v\n1;0,5;1,5\n2;1,25;1.000\n")
    with pytest.raises(InvalidData, match=r"line 3: column 'v' is '1\.000', which does not fit"):
        list(open_source(str(path), schema).batches)


def exact(text: str, kind: DataType) -> Decimal | None:
    """Returns the value of a text by Python's Decimal, or None if the type cannot hold it."""
    context = Context(prec=200, traps=[InvalidOperation])
    value = Decimal(text)
    assert kind.precision is not None and kind.scale is not None
    try:
        scaled = value.quantize(Decimal(1).scaleb(-kind.scale), context=context)
    except InvalidOperation:
        return None
    return (
        scaled
        if scaled == value and scaled.copy_abs() < Decimal(10) ** (kind.precision - kind.scale)
        else None
    )


def drawn(random: random.Random) -> str:
    """Returns a random number as text, of any length, with or without a fraction and an exponent."""

    def digits(most: int) -> str:
        return "".join(random.choice("0123456789") for _ in range(random.randint(0, most)))

    text = random.choice(["", "-", "+"]) + random.choice(["", "0", "000", "9" * 37]) + digits(12) + "5"
    if random.random() < 0.5:
        text += "." + digits(random.choice([3, 12, 40])) + random.choice(["", "00", "0" * 30])
    if random.random() < 0.4:
        text += (
            random.choice("eE") + random.choice(["", "-", "+"]) + str(random.choice([0, 1, 5, 20, 37, 90]))
        )
    return text


@pytest.mark.slow
def test_decimals_equal_those_of_python() -> None:
    chance = random.Random(53)
    kinds = [dm.DECIMAL(*one) for one in [(1, 0), (5, 5), (10, 2), (18, 4), (38, 0), (38, 10), (38, 38)]]
    outcomes = {True: 0, False: 0}
    for _ in range(3_000):
        text, kind = drawn(chance), chance.choice(kinds)
        wanted = exact(text, kind)
        try:
            found = value_column(pa.array([text]), dm.Field("v", kind, nullable=True))[0].as_py()
        except UnfitText:
            found = None
        assert found == wanted, (text, kind)
        outcomes[wanted is None] += 1
    assert min(outcomes.values()) > 500


@pytest.mark.parametrize("text", ["1_0", "nan", "inf", "0x10", "\uff11", "1e", "--1", ".", "1,000", "1 0"])
def test_texts_that_are_not_numbers_are_refused_as_decimals(tmp_path: Path, text: str) -> None:
    for name in ("a.csv", "a.jsonl"):
        path = written(tmp_path / name, [f'"{text}"'])
        with pytest.raises(InvalidData, match="does not fit decimal"):
            loaded(path, dm.DECIMAL(10, 2))


@pytest.mark.few(2)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("kind", [dm.INT, dm.LONG])
def test_floats_without_a_fraction_are_read_as_whole_numbers(
    tmp_path: Path, suffix: str, kind: DataType
) -> None:
    texts = ["5.0", "-3.00", "0.0", "-0.0", "7"] + ([] if suffix == "jsonl" else ["5.", '"6.0"', " 8.0 ", ""])
    path = written(tmp_path / f"a.{suffix}", texts)
    assert loaded(path, kind) == [5, -3, 0, 0, 7] + ([] if suffix == "jsonl" else [5, 6, 8, None])
    others = ["5.5", "5.0000001", "9007199254740994.0", "0x10"]
    # the parser of JSON reads these as 10 or as a number that may have been rounded
    others += [] if suffix == "jsonl" else ["1.0e1", "1e5", "99999999999999999999.0"]
    for other in others:
        given = f'"{other}"' if other == "0x10" else other
        path = written(tmp_path / f"b.{suffix}", ["5.0", given])
        line = 3 if suffix == "csv" else 2
        with pytest.raises(InvalidData, match=rf"line {line}: column 'v' is '{other}', which does not fit"):
            loaded(path, kind)


@pytest.mark.slow
def test_whole_floats_of_a_long_file_keep_every_row(tmp_path: Path) -> None:
    values = [str(k) for k in range(300_000)] + ["5.0", ""] + [f"{k}.0" for k in range(1_000)]
    found = loaded(written(tmp_path / "a.csv", values), dm.LONG)
    assert found == [*range(300_000), 5, None, *range(1_000)]
    with pytest.raises(InvalidData, match=r"line 301,004: column 'v' is 'x', which does not fit long; if"):
        loaded(written(tmp_path / "a.csv", [*values, "x"]), dm.LONG)


def test_whole_floats_can_be_keys_and_have_a_decimal_comma(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("k;x;v\n1,0;0,5;1,0\n2,0;1,5;\n")
    schema = dm.Schema(
        [K], [], [dm.Field("x", dm.DOUBLE, nullable=True), dm.Field("v", dm.INT, nullable=True)]
    )
    rows = [row for batch in open_source(str(path), schema).batches for row in batch.to_pylist()]
    assert rows == [{"k": 1, "x": 0.5, "v": 1}, {"k": 2, "x": 1.5, "v": None}]


@pytest.mark.parametrize("text", ["1e-400", "-2.5E-330", "0." + "0" * 350 + "1"])
@pytest.mark.parametrize(
    ("kind", "value"), [(dm.DOUBLE, "{}"), (dm.FLOAT, "{}"), (dm.LIST(dm.DOUBLE), "[1.5, {}]")]
)
def test_a_json_number_too_small_for_a_double_is_refused(
    tmp_path: Path, kind: DataType, value: str, text: str
) -> None:
    path = written(tmp_path / "a.jsonl", [value.format("1.5"), value.format(text)])
    with pytest.raises(InvalidData, match=r"line 2: column 'v' is .*, which does not fit"):
        loaded(path, kind)
    path = written(tmp_path / "a.jsonl", [value.format("0e-400"), "null", value.format("1.5")])
    found = loaded(path, kind)
    assert found[1] is None and found[0] in (0, [1.5, 0]) and found[2] in (1.5, [1.5, 1.5])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words", [["inf"], ["nan"], ["-inf", "nan"], ["Infinity"], ["+Inf", "NaN", "-infinity"]]
)
@pytest.mark.parametrize("numbers", [["1.5"], ["5"], ["5", "-1.5", "2e3"]])
def test_infinity_and_nan_beside_numbers_are_doubles(
    tmp_path: Path, words: list[str], numbers: list[str]
) -> None:
    for values in (words + numbers, numbers + words, words[:1] + numbers + words[1:]):
        found = infer(written(tmp_path / "a.csv", values), ["k"])
        assert found.schema.field("v").type == dm.DOUBLE, values
        rows = [
            row for batch in open_source(found.files, found.schema).batches for row in batch["v"].to_pylist()
        ]
        assert str(rows) == str([float(one) for one in values])
    assert infer(written(tmp_path / "b.csv", words), ["k"]).schema.field("v").type == dm.STRING
    assert (
        infer(written(tmp_path / "c.csv", [*words, "x", *numbers]), ["k"]).schema.field("v").type == dm.STRING
    )


@pytest.mark.slow
@pytest.mark.parametrize("between", ["/", "-", "."])
def test_a_two_digit_year_is_the_last_part_of_a_date_if_possible(tmp_path: Path, between: str) -> None:
    def format_of(*days: str) -> tuple[str, bool]:
        path = written(tmp_path / "a.csv", [day.replace("/", between) for day in days])
        found = infer(path, ["k"])
        (how,) = found.files.formats.values()
        return dict(how.time_formats)["v"].replace(between, "/"), bool(found.unsure)

    assert format_of("31/12/20", "30/11/20") == ("%d/%m/%y", True)
    assert format_of("01/02/03") == ("%d/%m/%y", True)
    assert format_of("12/31/20", "11/30/20") == ("%m/%d/%y", False)
    assert format_of("31/12/99", "30/11/20") == ("%d/%m/%y", False)
    assert format_of("99/12/31", "20/11/30") == ("%y/%m/%d", False)
