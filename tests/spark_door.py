"""Spark's door to an instance: `format("dormouse")`, with a session of this process."""

from __future__ import annotations

import json
import re
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
from tests.every_door import Door, Failed, House, Rows, Where, json_where, of_arrow

_ERROR = re.compile(r"(?:dormouse\.errors(?:\.\w+)*\.)?(?P<name>[A-Z]\w+): (?P<text>.*)")


class Spark(Door):
    """`spark.read` and `DataFrame.write` of `format("dormouse")`, with a session of this process."""

    def __init__(self, house: House, session: SparkSession) -> None:
        super().__init__(house)
        self._session = session
        self._options = {"dsn": house.dsn, "objects": house.objects}

    def ask(self, verb: str, **how: Any) -> Any:
        try:
            return super().ask(verb, **how)
        except PySparkException as error:
            return failure_of(str(error))

    def query(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> Rows:
        return of_arrow(self._frame(table, where, columns, **how).toArrow())

    def count(self, table: str, where: Where = None, **how: Any) -> int:
        return self._frame(table, where, **how).count()

    def changes(self, table: str, after: Any, till: Any = None, columns: Any = None, **how: Any) -> Rows:
        moments = {"changes_after": after, "changes_till": till}
        return of_arrow(self._frame(table, None, columns, **moments, **how).toArrow())

    def ingest(self, table: str, content: bytes, name: str, **how: Any) -> None:
        """Adds the rows of a file. A column that the table lacks becomes a column of whole numbers."""
        path = self.house.put(name, content)
        types = {one.name: str(one.type) for one in self.house.instance.table(table).schema.fields}
        reader = self._session.read
        if name.endswith(".csv"):
            header = content.decode().partition("\n")[0].split(",")
            frame = reader.csv(
                path, ", ".join(f"{one} {types.get(one, 'bigint')}" for one in header), header=True
            )
        else:
            frame = reader.json(path, ", ".join(f"{one} {kind}" for one, kind in types.items()))
        writer = frame.write.format("dormouse").options(**self._options, table=table, **how)
        writer.mode("append").save()

    def _frame(self, table: str, where: Where = None, columns: Any = None, **how: Any) -> DataFrame:
        asked = {"columns": columns and ",".join(columns), **how}
        if where is not None:
            asked["where"] = json.dumps(json_where(where))
        given = {name: value for name, value in asked.items() if value is not None}
        return self._session.read.format("dormouse").options(**self._options, table=table, **given).load()


def failure_of(text: str) -> Failed:
    """Returns the last error of Dormouse in a traceback of Spark's workers."""
    told = [found for line in text.splitlines() if (found := _ERROR.search(line.strip()))]
    ours = [one for one in told if hasattr(dm.errors, one["name"])]
    return Failed(ours[-1]["text"], ours[-1]["name"]) if ours else Failed(text)
