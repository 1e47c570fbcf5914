"""A program for spark-submit: an ingest, compactions or split points, on a laptop, a cluster or EMR.

    spark-submit job.py ingest flights s3://bucket/january/ --dsn rds-iam://… --objects s3://bucket/data
    spark-submit job.py compact flights --instance ./lake
    spark-submit job.py split-points january.parquet --row-key carrier --leaves 64

Without --instance, or --dsn and --objects, the program uses the driver's environment. It prints its result as
one line of JSON. The line begins with a brace, because spark-submit mixes output and log in one stream. The
exit code is 0 if all is done, 1 after a failure, which the log names, and 2 if the work cannot begin.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from dormouse.datasource.options import TableOptions, parsed
from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.json_values import json_value
from dormouse.spark.frames import rows_at
from dormouse.spark.run import BAD_USAGE, DONE, FAILED, Stopped, until_told_to_stop
from dormouse.spark.session import REDACTED, REDACTED_BY_SPARK
from dormouse.spark.tasks import dormouse_error
from dormouse.verbs.loading import LoadRequest
from dormouse.verbs.rounds import CompactRequest
from dormouse.verbs.verb import Request, fields_of

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)  # at INFO it logs each connection
    given = _parser().parse_args(arguments)
    try:
        with until_told_to_stop():
            done, failure = given.work(given)
    except Stopped:
        failure = f"{given.name} was stopped; its unfinished work was returned"
    except InvalidInput as error:
        logger.error("%s", error)  # noqa: TRY400
        return BAD_USAGE
    except DormouseError as error:
        failure = str(error)
    else:
        print(json.dumps(done))  # noqa: T201
    if failure is not None:
        logger.error("%s", failure)
    return DONE if failure is None else FAILED


_Done = tuple[Mapping[str, Any], str | None]
"""The result as JSON, and the failure, if any."""


def ingest(given: argparse.Namespace) -> _Done:
    """Adds the rows of files to a table, in one commit. Repeating it with the same id adds nothing."""
    with _options(given).open(writes=True) as table:
        _session(given)
        report = table.ingest(given.paths, engine="spark", **_arguments(given, LoadRequest))
    return dataclasses.asdict(report), None


def compact(given: argparse.Namespace) -> _Done:
    """Runs a round of compaction: makes jobs, and runs all due jobs as Spark tasks."""
    with _options(given).open(writes=True) as table:
        _session(given)
        report = table.compact(engine="spark", **_arguments(given, CompactRequest))
    failure = f"given up: {report.given_up} jobs; the first: {report.errors[0]}" if report.given_up else None
    return dataclasses.asdict(report), failure


def split_points(given: argparse.Namespace) -> _Done:
    """Returns suitable split points for a new table, computed from a sample of the rows of Parquet files."""
    from dormouse.sources.infer import schema_like
    from dormouse.spark.ingest import split_points

    spark = _session(given)
    try:
        frame = rows_at(spark, given.paths)
    except Exception as failure:
        raise dormouse_error(failure) from failure
    schema = schema_like(to_arrow_schema(frame.schema).empty_table(), [given.row_key])
    return {"split_points": [json_value(point) for point in split_points(frame, schema, given.leaves)]}, None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="job.py", description=(__doc__ or "").partition("\n")[0])
    works = parser.add_subparsers(dest="name", required=True)

    def work(function: Any) -> argparse.ArgumentParser:
        made = works.add_parser(function.__name__.replace("_", "-"), description=function.__doc__)
        made.set_defaults(work=function)
        return made

    of_table = [work(ingest), work(compact)]
    for each in of_table:
        each.add_argument("table")
        each.add_argument(
            "--instance", help="the instance's folder, which driver and workers see under one path"
        )
        each.add_argument("--dsn", help="the instance's PostgreSQL")
        each.add_argument("--objects", help="the instance's object store")
    points = work(split_points)
    for each in (of_table[0], points):
        each.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, or URLs of Parquet")
    models: list[type[Request]] = [LoadRequest, CompactRequest]
    for each, model in zip(of_table, models, strict=True):
        for name in fields_of(model, "table", "engine"):
            field, option = model.model_fields[name], f"--{name.replace('_', '-')}"
            if field.annotation is bool:
                each.add_argument(option, action="store_true", help=field.description)
            elif name == "evolve":
                each.add_argument(
                    "--add-columns", action="store_const", const="add", dest=name, help=field.description
                )
            else:
                each.add_argument(option, help=field.description)
    points.add_argument("--row-key", required=True, help="the first row key of the table")
    points.add_argument("--leaves", type=int, required=True, help="the number of leaves of the table")
    return parser


def _arguments(given: argparse.Namespace, model: type[Request]) -> dict[str, Any]:
    """Returns the arguments of a verb as Python values, without the table and the engine."""
    values = {name: getattr(given, name) for name in fields_of(model, "table", "engine")}
    texts = {name: str(value) for name, value in values.items() if value not in (None, False)}
    return {name: value for name, value in parsed(model, texts).items() if name in values}


def _options(given: argparse.Namespace) -> TableOptions:
    named = {name: getattr(given, name) for name in ("table", "instance", "dsn", "objects")}
    return TableOptions.parse({name: value for name, value in named.items() if value is not None})


def _session(given: argparse.Namespace) -> SparkSession:
    """Returns the session with the master and settings of spark-submit."""
    spark = SparkSession.builder.appName(f"dormouse-{given.name}").getOrCreate()
    for name, ours in REDACTED.items():
        if spark.conf.get(name) == REDACTED_BY_SPARK:  # keeps a user's own setting
            spark.conf.set(name, ours)
    return spark


if __name__ == "__main__":
    sys.exit(main())
