"""The settings of row tables."""

from __future__ import annotations

from collections.abc import Iterator

from dormouse.settings.section import Acu, Section, setting

DATABASES_MAX = 16


class RowsSettings(Section):
    """Row tables: the databases in which they are indexed, and the query service's work on them."""

    databases: int = setting(2, ge=1, le=DATABASES_MAX)
    """How many databases have the indexes, copies of the current rows; tables are spread by load."""

    own_clusters: bool = setting(False)
    """Whether each of these databases is a serverless cluster of its own, which pauses itself when it is not
    asked; else they are databases of the instance's cluster. Indexes are made anew when it changes."""

    max_acu: Acu = setting(4)
    """The most capacity of each cluster of its own."""

    job_threads: int = setting(4, ge=0, le=64)
    """How many jobs a task of the query service runs at once: changes and loads of row tables, the work on
    their indexes. It logs in to the database as who may change rows then; with 0 it only reads."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if "max_acu" in self.model_fields_set and not self.own_clusters:
            yield "max_acu", "it is of clusters of their own: set own_clusters to true, or leave it out"
