"""What the files of a leaf hold within its region: how many rows, and where they are best divided."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

from dormouse.data.quantiles import KeyQuantiles
from dormouse.data.region_sketches import load_sketches, read_sketches
from dormouse.data.sketches import FileSketches, merge
from dormouse.errors import InvalidData, ObjectNotFound
from dormouse.model.file_reference import FileReference
from dormouse.model.keys import encode_value
from dormouse.model.partition_tree import Partition, Split
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore

logger = logging.getLogger(__name__)

SMALL_PART = 1 / 16
"""Of a smaller part of a file its sketches say too little; to read that part's keys costs little."""


class LeafSketches:
    """The files of one leaf, by what they hold of it. Raises `InvalidData` for a file that cannot be read."""

    def __init__(
        self, store: ObjectStore, schema: Schema, leaf: Partition, references: Sequence[FileReference]
    ) -> None:
        self._schema = schema
        self._leaf = leaf
        self._files = [_LeafFile(store, schema, leaf.region, reference) for reference in references]

    def row_count(self) -> int:
        """The leaf's rows: as its references tell where they are exact, else as the sketches do."""
        return sum(file.row_count() for file in self._files)

    def split_point(self) -> Split | None:
        """About the median of the first row key that can be divided; None when all keys are equal."""
        for name in self._schema.row_key_names:
            within = self._leaf.region.range(name)
            point = self._quantiles(name).split_point(within)
            if point is None:
                for file in self._files:
                    file.read_what_is_cut()
                point = self._quantiles(name).split_point(within)
            if point is not None:
                return Split(name, point)
        return None

    def _quantiles(self, field: str) -> KeyQuantiles:
        parts = [file.about(field) for file in self._files]
        return merge(self._schema.field(field), [part for part in parts if part is not None])


def left_share(store: ObjectStore, schema: Schema, partition: Partition, reference: FileReference) -> float:
    """Which part of a file's rows in a partition that was divided belongs to its left child."""
    if partition.split is None:
        raise ValueError(f"partition {partition.partition_id!r} is not divided")
    field, within = partition.split.field, partition.region.range(partition.split.field)
    sketches = _LeafFile(store, schema, partition.region, reference).about(field)
    quantiles = merge(schema.field(field), [] if sketches is None else [sketches])
    return quantiles.rank(partition.split.point, within)


class _LeafFile:
    """One file of a leaf, or of a partition that was one."""

    def __init__(self, store: ObjectStore, schema: Schema, region: Region, reference: FileReference) -> None:
        self._store = store
        self._schema = schema
        self._region = region
        self._reference = reference
        self._must_read = False

    def about(self, field: str) -> FileSketches | None:
        """Sketches whose `field`, within the leaf's range of it, is that of the leaf's rows.

        The file's own, unless they also speak of rows that another row key keeps out of the leaf.
        """
        if self._must_read or self._cuts - {field} or self._is_small(field):
            return self._read
        return self._own

    def read_what_is_cut(self) -> None:
        """From now on no sketches that also speak of rows outside of the leaf."""
        self._must_read = self._must_read or bool(self._cuts)

    def row_count(self) -> int:
        if not self._reference.count_approximate:
            return self._reference.row_count
        field = min(self._cuts, default=self._schema.row_key_names[0])
        sketches = self.about(field)
        if sketches is None:
            return 0
        if sketches is not self._own or not self._cuts:
            return sketches.row_count
        return self._rows_inside(sketches, field)

    @cached_property
    def _own(self) -> FileSketches | None:
        name = self._reference.filename
        try:
            return load_sketches(self._store, name, self._schema)
        except (InvalidData, ObjectNotFound) as error:
            logger.warning("the row keys of %s are read instead of its sketches: %s", name, error)
            return self._read

    @cached_property
    def _read(self) -> FileSketches | None:
        return read_sketches(self._store, self._reference.filename, self._schema, self._region)

    @cached_property
    def _cuts(self) -> frozenset[str]:
        """The row keys by which some of the file's rows lie outside of the leaf."""
        if self._reference.only_contains_data_for_this_partition or self._own is None:
            return frozenset()
        return frozenset(name for name in self._schema.row_key_names if self._is_cut(self._own, name))

    def _is_cut(self, sketches: FileSketches, name: str) -> bool:
        key, item, type_ = sketches.keys[name], self._region.range(name), self._schema.field(name).type
        below = item.min is not None and key.min < encode_value(type_, item.min)
        return below or (item.max is not None and key.max >= encode_value(type_, item.max))

    def _is_small(self, field: str) -> bool:
        if field not in self._cuts or self._own is None:
            return False
        return self._rows_inside(self._own, field) < SMALL_PART * self._own.row_count

    def _rows_inside(self, sketches: FileSketches, field: str) -> int:
        return merge(self._schema.field(field), [sketches]).row_count(self._region.range(field))
