"""Windows written so that DuckDB does not compute one over the partitions of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count as count_from
from itertools import pairwise
from operator import itemgetter

_FRAMES = {"rows", "range", "groups"}
_OPENING, _CLOSING = set("([{"), set(")]}")


def told_apart(statement: str, tokens: Sequence[tuple[int, str]]) -> str:
    """Returns the statement with different numbers of expressions in PARTITION BY clauses that differ.

    DuckDB 1.5 takes two lists of as many expressions for one if each of the first is in the second
    (https://github.com/duckdb/duckdb/issues/24629). It compares them after it simplified them: `a` and
    `coalesce(a, 1)` are one where no value of `a` is null. Lists of different lengths are never taken for
    one, and a constant at the end of a list changes no partition.

    - `tokens`: of the statement, as of `words`.
    """
    raw = statement.encode()
    # a quoted name is no keyword
    unquoted = [(start, "" if raw[start : start + 1] == b'"' else word) for start, word in tokens]
    lists = [(raw[start:end].strip(), end, count) for start, end, count in _partitions(unquoted)]
    lengths: dict[bytes, int] = {}
    for expressions, _, count in lists:
        if expressions not in lengths:
            # lists of one expression are taken for one only where they are the same
            free = (n for n in count_from(count) if n == 1 or n not in lengths.values())
            lengths[expressions] = next(free)
    for expressions, end, count in sorted(lists, key=itemgetter(1), reverse=True):
        raw = raw[:end] + b", true " * (lengths[expressions] - count) + raw[end:]
    return raw.decode()


def _partitions(tokens: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int, int]]:
    """Yields where the expressions of each PARTITION BY begin and end, in UTF-8, and how many they are."""
    for n, pair in enumerate(pairwise(word for _, word in tokens), 2):
        if pair != ("partition", "by"):
            continue
        depth, count, before = 0, 1, ","
        for end, word in tokens[n:]:
            is_frame = word in _FRAMES and before not in {",", "."}
            if depth == 0 and (word in _CLOSING or word == "order" or is_frame):
                yield tokens[n][0], end, count
                break
            depth += (word in _OPENING) - (word in _CLOSING)
            count += depth == 0 and word == ","
            before = word
