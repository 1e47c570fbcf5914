"""Fixtures: a real PostgreSQL database for each test, copied from a template, and moto as AWS on loopback."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import botocore.session
import psycopg
import pytest
import typer.main
from hypothesis import settings
from psycopg.conninfo import make_conninfo
from queues import queue_numbers
from xdist.scheduler import LoadFileScheduling

import dormouse as dm
from dormouse.cli import main
from dormouse.embedded import server
from dormouse.postgres import ConnectionSupplier, Retries, transaction
from dormouse.state.commits import committer
from tests import java
from tests.aws_server import aws_server
from tests.built import built_lambdas, lambda_sources  # noqa: F401 fixtures
from tests.cloudformation import CloudFormation
from tests.databases import Databases, name_of
from tests.inlining import also_inlined, inlining, objects_of_module  # noqa: F401 fixtures
from tests.other_postgres import use_what_is_named
from tests.prepared import copied as copied_directory
from tests.run_folder import RunFolder, spread
from tests.support.api import Instance, Table
from tests.support.commits import PostgresQueue
from tests.support.embedded import EmbeddedPostgres
from tests.support.model import LONG, Field, Schema, TableProperties
from tests.support.objects import ObjectStore, open_store
from tests.support.state import Catalog, TableContext, WriteAttempts
from tests.tiers import (
    FAST,
    leave_cases_to_the_slow_tier,
    leave_layouts_to_the_slow_tier,
    leave_matrices_to_the_slow_tier,
)

BUCKET = "dormouse-test"
TESTS = Path(__file__).parent
# a stopped committer ends only when its wait does, and a test waits for its committer
committer.WAIT_SECONDS = 0.2
_names = itertools.count(1)

# the groups that take so long that they could end last, the longest first
LONGEST = (
    "Spark", "Node", "test_spark_session", "test_embedded_sharing", "test_ingest_crash", "test_cli",
    "test_batches", "test_embedded_postgres", "test_instance_folder", "test_demo", "test_service_streams",
    "test_many_workers", "test_concurrency", "test_objects", "test_async_commits", "test_commit_storm",
    "test_store_under_fire", "test_updates", "test_small_batches", "test_listed_deletions",
    "test_edits_crash", "test_merges", "test_edits_overlap", "test_edits_model",
    # in the slow tier
    "test_deploy_local", "test_spark_cluster", "test_spark_submit",
    "test_changes_model", "test_keyed_model", "test_history_model", "test_history_storm",
    "test_deletes_model", "test_deletes_faults", "test_bank", "test_keyed_storm", "test_small_storm",
)  # fmt: skip
# these use Spark in their own process: one worker runs them all, with one Java
SPARK = (
    "test_spark_ingest", "test_spark_run", "test_spark_compaction", "test_spark_deletes",
    "test_key_order_spark", "test_s3", "test_demo_in_process", "test_spark_source", "test_spark_streams",
    "test_keyed_spark", "test_reshaping_writers", "test_reshaping_races",
    "test_spark_jobs", "test_spark_bad_input", "test_spark_missing_columns", "test_door_spark",
    "test_row_filter", "test_rows_by_name", "test_spark_functions", "test_spark_merge", "test_spark_verified",
)  # fmt: skip
HOUSE = ("test_support", "test_tidy", "test_words")
"""The files that read the syntax trees of all files, which one worker parses."""
os.environ |= {"SPARK_SUBMIT_OPTS": java.OPTIONS, "SPARK_LAUNCHER_OPTS": java.QUICK}
os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # it would make 1,296 images for each test of EC2
# The time of an example depends on the machine, and a failure prints its example.
settings.register_profile("thorough", deadline=None, database=None, print_blob=True, max_examples=60)
settings.register_profile(FAST, settings.get_profile("thorough"), max_examples=10)
# Service descriptions and the command tree are slow to load: load them once, not in each session.
botocore.session.create_loader = cache(botocore.session.create_loader)
typer.main.get_command = cache(typer.main.get_command)
# The files of tests need not survive a power cut either. Tests of flushes put their own function here.
os.fsync = lambda _: None
server.Server._initialize = copied_directory  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Sets up Hypothesis and the run's folder. The fast tier tries fewer examples than the full run."""
    use_what_is_named()
    gc.disable()  # until all tests are collected, which makes millions of objects that stay
    settings.load_profile(FAST if config.option.markexpr == "not slow" else "thorough")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunFolder(), "run folder")
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = begun_apart(config.workerinput["workerid"], config.workerinput["workercount"])


def begun_apart(worker: str, workers: int) -> list[str]:
    """Returns the folders of all tests, in an order that begins at another folder for each worker.

    A worker then finds modules that other workers have already compiled. Compiling takes longer than
    importing.
    """
    folders = sorted(str(path) for path in TESTS.glob("*/") if any(path.rglob("test_*.py")))
    start = int(worker.removeprefix("gw")) * len(folders) // workers
    return folders[start:] + folders[:start]


def group(file: Path) -> str:
    """Returns the group of a test file. One worker runs all tests of a group.

    A group is one file, or all files that use Spark in their own process, that use the CDK, or that read the
    syntax trees of all files. Java, the CDK's Node and the parser take seconds. The files import the CDK only
    within their tests, because each worker imports all files.
    """
    if file.parent.name == "infrastructure" or file.stem == "test_lambda_packages":
        return "Node"
    if file.stem in HOUSE:
        return "House"
    return "Spark" if file.stem in SPARK else file.stem


class OneOfEach(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group(Path(super()._split_scope(nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return OneOfEach(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests for the slow tier, and puts the long groups first, so that all workers end together."""
    leave_layouts_to_the_slow_tier(items)
    leave_matrices_to_the_slow_tier(items)
    leave_cases_to_the_slow_tier(items)
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(group(item.path), len(order)), item.path))


def pytest_collection_finish() -> None:
    """Leaves what was collected, which lives until the end, out of each search for garbage."""
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    also_inlined(metafunc)


def pytest_runtest_setup() -> None:
    """Restores Ctrl-C for tests and the processes that they start, if the run ignores it (`nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> Retries:
    """Returns the count of transaction retries in this test."""
    monkeypatch.setattr(transaction, "RETRIES", counts := Retries())
    return counts


@pytest.fixture(scope="session", autouse=True)
def spread_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Spreads the folders of tests over the disk, as `run_folder` does for the folders of the run."""
    spread(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def server_dsn() -> Iterator[str]:
    """Yields the DSN of a server whose data need not survive a power cut; each xdist worker has its own
    server.
    """
    folder = Path(tempfile.mkdtemp(prefix="dormouse-tests-"))
    options = {
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "off",
        "autovacuum": "off",
        "checkpoint_timeout": "1h",
        "wal_init_zero": "off",
        "shared_buffers": "64MB",  # small, because dropping a database searches all of them
    }
    try:
        with EmbeddedPostgres(folder, options=options) as server:
            yield server.dsn
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def databases(server_dsn: str) -> Databases:
    return Databases(server_dsn)


@pytest.fixture(scope="session")
def new_database(databases: Databases) -> Callable[[str], str]:
    """Returns a function that makes a database, as a copy of the given template, and returns its DSN."""
    return databases.create


@pytest.fixture(scope="session")
def template_database(databases: Databases) -> str:
    """Returns the name of a database with all migrations, for `new_database` to copy."""
    return name_of(databases.template)


@pytest.fixture
def empty_dsn(databases: Databases) -> Iterator[str]:
    """Yields the DSN of a fresh database without migrations."""
    dsn = databases.create("template0")
    yield dsn
    databases.drop(dsn)


@pytest.fixture
def dsn(databases: Databases) -> Iterator[str]:
    """Yields the DSN of a migrated database without rows."""
    with databases.lent() as dsn:
        yield dsn


@pytest.fixture
def supplier(dsn: str) -> Iterator[ConnectionSupplier]:
    """Yields a supplier of connections to a fresh migrated database."""
    supplier = ConnectionSupplier(dsn)
    yield supplier
    supplier.close()


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an empty instance for one test."""
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as opened:
        yield opened


@pytest.fixture(scope="module")
def module_instance(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    """Yields an instance that all tests of one module share."""
    with dm.connect(new_database(template_database), tmp_path_factory.mktemp("objects").as_uri()) as opened:
        yield opened


@pytest.fixture
def table_t(instance: Instance) -> Table:
    """Returns a table `t` of one key, in the instance."""
    return instance.create_table("t", Schema([Field("key", LONG)]))


@pytest.fixture(scope="session")
def shared_supplier(
    new_database: Callable[[str], str], template_database: str
) -> Iterator[tuple[str, ConnectionSupplier]]:
    """Yields the DSN and supplier of a shared database. Its tests must look only at their own tables."""
    dsn = new_database(template_database)
    supplier = ConnectionSupplier(dsn, connections_max=16)
    yield dsn, supplier
    supplier.close()


@pytest.fixture(scope="session")
def new_table_in(shared_supplier: tuple[str, ConnectionSupplier]) -> Callable[..., TableContext]:
    """Returns a function that makes a table in the shared database, by default with one LONG as row key."""
    dsn, supplier = shared_supplier

    def create(
        objects: ObjectStore,
        *row_keys: Field,
        layout: str = "file_table",
        split_points: Sequence[Any] = (),
        **properties: Any,
    ) -> TableContext:
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            f"table_{next(_names)}",
            Schema(row_keys or [Field("key", LONG)]),
            TableProperties(**properties),
            layout,
            split_points,
        )
        return TableContext(dsn, supplier, objects, record)

    return create


@pytest.fixture
def new_table(new_table_in: Callable[..., TableContext], tmp_path: Path) -> Callable[..., TableContext]:
    """Returns a function that makes a table in the shared database; its objects are in the test's folder."""
    return partial(new_table_in, open_store(tmp_path / "objects"))


@pytest.fixture(scope="session")
def spark() -> Any:
    """Returns a Spark session in the tests' own process, which lives until the process ends."""
    from dormouse.spark.session import spark_session

    return spark_session(cores=2, driver_memory="1g")


@pytest.fixture(scope="session")
def quick_java(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes the archive by which Java starts quickly, for slow tests, which start Java many times."""
    java.make_archive(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="session")
def aws_endpoint() -> Iterator[str]:
    """Yields the URL of a simulated AWS on loopback."""
    with aws_server() as url:
        yield url


@pytest.fixture(scope="session")
def s3_endpoint(aws_endpoint: str) -> str:
    """Returns the URL of an S3 that has one bucket."""
    endpoint = aws_endpoint
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket=BUCKET)
    return endpoint


@pytest.fixture
def s3_options(s3_endpoint: str, tmp_path: Path) -> dict[str, str]:
    return {
        "endpoint": s3_endpoint,
        "region": "us-east-1",
        "access_key_id": "test",
        "secret_access_key": "test",
        "staging_dir": str(tmp_path / "staging"),
    }


@pytest.fixture
def s3_store(s3_options: dict[str, str]) -> ObjectStore:
    """Returns an empty store for one test, below its own prefix."""
    return open_store(f"s3://{BUCKET}/{uuid4().hex}/lake", **s3_options)


@pytest.fixture
def sqs_options(aws_endpoint: str) -> dict[str, str]:
    return {
        "endpoint_url": aws_endpoint,
        "region_name": "us-east-1",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
    }


@pytest.fixture
def new_sqs_queue(aws_endpoint: str) -> Callable[..., str]:
    """Returns a function that makes a standard queue with the given attributes and returns its URL."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("sqs", endpoint_url=aws_endpoint, region_name="us-east-1", **keys)

    def create(**attributes: str) -> str:
        return str(client.create_queue(QueueName=f"q{uuid4().hex}", Attributes=attributes)["QueueUrl"])

    return create


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs a command in an empty folder and returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dormouse", *args])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def cloudformation() -> Iterator[CloudFormation]:
    """Yields a stand-in for CloudFormation, which waits for the answer of a custom resource."""
    stack = CloudFormation()
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def own_database(
    new_database: Callable[[str], str], template_database: str
) -> Iterator[tuple[str, ConnectionSupplier]]:
    """Yields the DSN and supplier of a database for one module. The module's tests only read it."""
    dsn = new_database(template_database)
    with closing(ConnectionSupplier(dsn)) as supplier:
        yield dsn, supplier


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an instance folder to copy, whose server was set up and then stopped."""
    folder = tmp_path_factory.mktemp("prepared")
    with EmbeddedPostgres(folder):
        pass
    return folder


@pytest.fixture
def server_folder(prepared_folder: Path) -> Iterator[Path]:
    """Yields an instance folder whose server does not run yet."""
    parent = Path(tempfile.mkdtemp(prefix="dormouse-embedded-"))
    folder = parent / "lake"
    subprocess.run(["cp", "-a", prepared_folder, folder], check=True)
    yield folder
    for process in server._processes_in(folder / "postgres"):
        process.kill()
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def counted(supplier: ConnectionSupplier) -> ConnectionSupplier:
    """Returns a supplier for a database with a table of two counters."""
    with supplier.connection() as conn:
        conn.execute("create table counter (id integer primary key, n integer not null)")
        conn.execute("insert into counter values (1, 0), (2, 0)")
    return supplier


@pytest.fixture
def number() -> int:
    """Returns the number of a new queue in the shared database."""
    return next(queue_numbers)


@pytest.fixture
def dsn_of_all(shared_supplier: tuple[str, ConnectionSupplier]) -> str:
    return shared_supplier[0]


@pytest.fixture
def lender(shared_supplier: tuple[str, ConnectionSupplier]) -> ConnectionSupplier:
    return shared_supplier[1]


@pytest.fixture
def queue(lender: ConnectionSupplier, number: int) -> PostgresQueue:
    """Returns an empty queue in the shared database."""
    return PostgresQueue(lender, number)


@pytest.fixture
def dropped(dsn: str) -> Any:
    """Yields a list of names; the databases in it are dropped at the end."""
    names: list[str] = []
    yield names
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
        for name in names:
            conn.execute(f"drop database {name} with (force)")


@pytest.fixture
def copied(dsn: str, dropped: list[str]) -> Callable[[], str]:
    """Returns a function that copies the database, which no session may have open, and returns the DSN."""

    def copy() -> str:
        dropped.append(name := f"{name_of(dsn)}_copy_{len(dropped)}")
        with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
                [name_of(dsn)],
            )
            conn.execute(f"create database {name} template {name_of(dsn)}")
        return make_conninfo(dsn, dbname=name)

    return copy
