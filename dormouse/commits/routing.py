"""Which of an instance's queues a table's requests travel through."""

from __future__ import annotations

from hashlib import blake2b


def queue_number(table_id: int, queues: int) -> int:
    """0 to `queues` - 1, the same in every process; changing `queues` moves tables."""
    digest = blake2b(table_id.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % queues
