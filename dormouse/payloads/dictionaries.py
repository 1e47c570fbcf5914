"""Dictionaries of zstd, trained on payloads of a kind, where they gain enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zstandard

from dormouse.payloads.pack import compressed

DICTIONARY_BYTES = 64 * 2**10
SAMPLES_MIN = 200
SAMPLES_BYTES_MIN = 2**20
"""Of fewer, the dictionary would be the most of what is written."""

SAMPLES_BYTES_MAX = 4 * 2**20
GAIN_MIN = 0.10
"""Of what the payloads take without it, the dictionary's own share in an object included."""


def trained(texts: Iterable[bytes], object_bytes: int) -> bytes:
    """A dictionary that gains enough on such texts; else nothing.

    One half of them trains it, the other judges it. `object_bytes` is how large objects are that have it.
    """
    samples = _bounded(texts)
    if len(samples) < SAMPLES_MIN or sum(map(len, samples)) < SAMPLES_BYTES_MIN:
        return b""
    training, others = samples[::2], samples[1::2]
    try:
        # with these, it is made at once; zstd would try many
        made = zstandard.train_dictionary(
            DICTIONARY_BYTES, list(training), k=512, d=8, f=20, accel=4
        ).as_bytes()
    except zstandard.ZstdError:  # too little is common to them
        return b""
    without = sum(map(len, compressed(others, b"", 1)))
    share = len(made) / max(object_bytes, len(made))
    with_it = sum(map(len, compressed(others, made, 1))) * (1 + share)
    return made if with_it < (1 - GAIN_MIN) * without else b""


def _bounded(texts: Iterable[bytes]) -> Sequence[bytes]:
    found, size = list[bytes](), 0
    for text in texts:
        size += len(text)
        if size > SAMPLES_BYTES_MAX:
            break
        found.append(text)
    return found
