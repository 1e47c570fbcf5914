"""Which integers Spark's hash partitioning sends where, so that each partition gets what we mean for it."""

from __future__ import annotations

from itertools import count

_SEED = 42
_MASK = 0xFFFFFFFF


def keys_of_partitions(partitions: int) -> tuple[int, ...]:
    """For each partition of `repartition(partitions, column)`, an INT that goes there."""
    keys: dict[int, int] = {}
    for number in count():
        keys.setdefault(spark_hash(number) % partitions, number)
        if len(keys) == partitions:
            return tuple(keys[partition] for partition in range(partitions))
    raise AssertionError


def spark_hash(number: int) -> int:
    """`hash(CAST(number AS INT))` of Spark SQL: Murmur3 of 32 bits, with the seed 42.

    https://github.com/apache/spark/blob/v4.0.2/common/unsafe/src/main/java/org/apache/spark/unsafe/hash/Murmur3_x86_32.java
    """
    mixed = _rotated(number * 0xCC9E2D51, 15) * 0x1B873593 & _MASK
    value = (_rotated(_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value ^= 4  # the length in bytes
    value = (value ^ value >> 16) * 0x85EBCA6B & _MASK
    value = (value ^ value >> 13) * 0xC2B2AE35 & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _rotated(value: int, bits: int) -> int:
    value &= _MASK
    return (value << bits | value >> 32 - bits) & _MASK
