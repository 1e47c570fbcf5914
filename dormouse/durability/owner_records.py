"""What an object store says of its owner: incarnations, how far the last has come, deletions under way.

`owner/<number>.json` is an incarnation. `owner/now/` has what comes and goes: milestones, and announcements
of deletions.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from dormouse.errors import NotAnInstance
from dormouse.objects import ObjectStore

FOLDER = "owner"
NOW = f"{FOLDER}/now"

_INCARNATION = re.compile(rf"{FOLDER}/(\d{{1,18}})\.json")
_MILESTONE = re.compile(rf"{NOW}/milestone-(\d{{1,18}})-(\d{{1,18}})\.json")
_DELETION = re.compile(rf"{NOW}/deletion-(\d{{1,18}})-[0-9a-f]+\.json")


@dataclass(frozen=True, slots=True)
class Records:
    """What one listing of the store gives; numbers are 0 for what there is none of."""

    last: int = 0
    """The last incarnation."""

    milestones: tuple[tuple[int, int], ...] = ()
    """The incarnation and the number of each."""

    deletions: tuple[tuple[int, str], ...] = ()
    """Of those announced, the incarnation and the object's name."""

    @property
    def milestone(self) -> int:
        """The last one of the last incarnation."""
        return max((milestone for number, milestone in self.milestones if number == self.last), default=0)


def records(objects: ObjectStore) -> Records:
    """The store's records, of now."""
    last = 0
    milestones: list[tuple[int, int]] = []
    deletions: list[tuple[int, str]] = []
    for name, _ in objects.list(FOLDER):
        if match := _INCARNATION.fullmatch(name):
            last = max(last, int(match[1]))
        elif match := _MILESTONE.fullmatch(name):
            milestones.append((int(match[1]), int(match[2])))
        elif match := _DELETION.fullmatch(name):
            deletions.append((int(match[1]), name))
    return Records(last, tuple(milestones), tuple(deletions))


def incarnation_name(number: int) -> str:
    return f"{FOLDER}/{number}.json"


def milestone_name(number: int, milestone: int) -> str:
    return f"{NOW}/milestone-{number}-{milestone}.json"


def new_deletion_name(number: int) -> str:
    """A name that no other deletion has."""
    return f"{NOW}/deletion-{number}-{secrets.token_hex(8)}.json"


def read_record(objects: ObjectStore, name: str, key: str) -> tuple[str, str]:
    """The id under `key`, and when it was made, and where. Raises `ObjectNotFound`, `NotAnInstance`."""
    try:
        said = json.loads(objects.get(name))
        return str(said[key]), str(said["made"])
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{objects.url}/{name} is not Dormouse's") from None


def written_now() -> str:
    """When a record is made, and where."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {socket.gethostname()}"
