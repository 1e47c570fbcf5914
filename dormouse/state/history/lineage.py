"""The history of a table's partitions as a page: one file, which needs nothing else, not even a network.

Each partition is a box, as wide as it was a leaf and as high as its part of the key space. How it looks is in
`lineage.html`, beside this module; here it is put together from the epochs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from html import escape
from importlib import resources
from typing import Any

from dormouse.model.region import Region
from dormouse.model.types import shown_value
from dormouse.state.context import TableContext
from dormouse.state.history.epochs import EpochRecord, Epochs, Life

Edges = dict[str, tuple[Any, Any]]
"""Of each partition where it begins and ends on the page; the numbers of one page compare with each other."""


def page(context: TableContext, first: int | None, last: int | None) -> str:
    """The page of some epochs of a table, as HTML."""
    epochs, table = Epochs(context.supplier, context.table), context.table.name
    records = list(epochs.epochs(first, last))
    first = records[0].epoch
    lives = list(epochs.lives(first, records[-1].epoch))
    rows = {leaf.partition_id: leaf.row_count for leaf in context.partitions.leaf_rows(0)}
    edges = _edges(context, records, lives)
    found = {"table": table, "first": first, **_epochs(records), **_partitions(lives, edges, rows)}
    # no text of a table ends the element that it is in
    data = json.dumps(found, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    text = resources.files(__package__ or "").joinpath("lineage.html").read_text("utf-8")
    return text.replace("{{title}}", escape(table)).replace("{{data}}", data)


def keys_of(region: Region) -> str:
    """A region as a person reads it."""
    parts = []
    for name, item in region.items():
        low, high = (None if end is None else _text(end) for end in (item.min, item.max))
        below = f"{name} < {high}"
        parts.append(below if low is None else f"{name} ≥ {low}" if high is None else f"{low} ≤ {below}")
    return ", ".join(parts) or "all keys"


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else shown_value(value)


def _epochs(records: Sequence[EpochRecord]) -> dict[str, Any]:
    return {
        "times": [round(record.created_at.timestamp() * 1_000) for record in records],
        "splits": [record.splits for record in records],
        "merges": [record.merges for record in records],
    }


def _partitions(lives: Sequence[Life], edges: Edges, rows: Mapping[str, int]) -> dict[str, Any]:
    ranks = {edge: rank for rank, edge in enumerate(sorted({end for ends in edges.values() for end in ends}))}
    columns: dict[str, Callable[[Life], Any]] = {
        "ids": lambda life: life.partition.partition_id,
        "low": lambda life: ranks[edges[life.partition.partition_id][0]],
        "high": lambda life: ranks[edges[life.partition.partition_id][1]],
        "created": lambda life: life.created,
        "sealed": lambda life: life.sealed,
        "rows": lambda life: (
            rows.get(life.partition.partition_id, 0) if life.sealed is None else life.row_count
        ),
        "bytes": lambda life: life.byte_count,
        "keys": lambda life: keys_of(life.partition.region),
    }
    return {name: [column(life) for life in lives] for name, column in columns.items()}


def _edges(context: TableContext, records: Sequence[EpochRecord], lives: Sequence[Life]) -> Edges:
    """By the first row key alone, or, where others divide partitions, too, by who was divided into whom."""
    first = context.schema.row_keys[0].name
    if all(life.partition.region.keys() <= {first} for life in lives):
        ranges = {life.partition.partition_id: life.partition.region.range(first) for life in lives}
        return {
            one: ((0,) if item.min is None else (1, item.min), (2,) if item.max is None else (1, item.max))
            for one, item in ranges.items()
        }
    tree = context.partitions.at(records[0].epoch)
    return _divided([*map(tree.node_id, tree.leaf_nodes())], records, lives)


def _divided(begun: Sequence[str], records: Sequence[EpochRecord], lives: Sequence[Life]) -> Edges:
    """Neighbours that end give their room to those that come, in equal parts."""
    edges: Edges = {one: (Fraction(n), Fraction(n + 1)) for n, one in enumerate(begun)}
    order = {life.partition.partition_id: n for n, life in enumerate(lives)}
    regions = {life.partition.partition_id: life.partition.region for life in lives}
    for record in records[1:]:
        for one in sorted(record.created, key=order.__getitem__):
            above = [p for p in record.sealed if _overlap(regions[p], regions[one])]
            low, high = min(edges[p][0] for p in above), max(edges[p][1] for p in above)
            beside = [p for p in record.created if any(_overlap(regions[p], regions[a]) for a in above)]
            part, at = (high - low) / len(beside), sorted(beside, key=order.__getitem__).index(one)
            edges[one] = (low + at * part, low + (at + 1) * part)
    return edges


def _overlap(one: Region, other: Region) -> bool:
    return all(one.range(name).intersect(item) is not None for name, item in other.items())
