"""All verbs by name. Doors that loop over them do it when they are opened, not when they are imported."""

from __future__ import annotations

from dormouse.verbs import loading, reading, rounds, rows, tables
from dormouse.verbs.verb import Verb

VERBS: dict[str, Verb] = {
    verb.name: verb for theme in (reading, loading, rounds, rows, tables) for verb in theme.VERBS
}
