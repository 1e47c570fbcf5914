"""The archive of `make emr-package`: reproducible, with all that a run needs besides Spark."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyspark
import pytest

import dormouse as dm
from dormouse.aws.schedules import runs
from dormouse.spark.session import java_home
from emr import build
from tests.standard import OF_NAMES
from tests.support.api import Instance

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
DRIVER = ROOT / "dormouse" / "spark" / "run.py"
SECONDS_MAX = 300
SCHEMA = OF_NAMES
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic", compaction_batch_files=3, split_threshold_rows=100, split_min_rows=10
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the sources, because the originals may be edited while the tests run."""
    folder = tmp_path_factory.mktemp("sources") / "dormouse"
    return Path(shutil.copytree(ROOT / "dormouse", folder))


def build_uncompressed(archive: Path, package: Path) -> None:
    """Builds an archive without its compression, which takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build.gzip, "GzipFile", lambda fileobj, **_: nullcontext(fileobj))
        build.build(build.native(), archive, package)


@pytest.fixture(scope="module")
def archive(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "dormouse.tar"
    build_uncompressed(path, package)
    return path


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the archive's files, as Spark unpacks them."""
    folder = tmp_path_factory.mktemp("unpacked") / "environment"
    folder.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="tar")
    return folder


@pytest.fixture(scope="module")
def clean(unpacked: Path, s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a run: Spark, Java, the archive's Python and S3, but not this checkout."""
    base = Path(sys.base_prefix) / "bin"
    python = str(unpacked / "bin" / "python")
    return {
        "PATH": f"{base}:/usr/bin:/bin",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "JAVA_HOME": str(java_home(os.environ)),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        # the options with which Java starts quickly in tests
        **{name: os.environ[name] for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS")},
    }


@pytest.fixture
def url() -> str:
    return f"s3://dormouse-test/{uuid4().hex}/data"


@pytest.fixture
def instance(dsn: str, url: str, s3_options: dict[str, str]) -> Iterator[Instance]:
    with dm.connect(dsn, url, **s3_options) as instance:
        yield instance


def spark_submit(clean: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = ["--master", "local[2]", "--driver-memory", "1g", "--conf", "spark.ui.enabled=false"]
    return subprocess.run(
        [SPARK_HOME / "bin" / "spark-submit", *settings, DRIVER, *arguments],
        env=clean,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_the_same_sources_give_the_same_bytes(archive: Path, package: Path, tmp_path: Path) -> None:
    """The second build has other times and modes of files, in another folder."""
    moved = tmp_path / "elsewhere"
    for path in shutil.copytree(package, moved, copy_function=shutil.copyfile).rglob("*.py"):
        path.chmod(0o600)
    again = tmp_path / "again.tar"
    build_uncompressed(again, moved)
    with archive.open("rb") as one, again.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()


def test_the_compressed_archive_has_no_name_and_no_time_of_the_build(package: Path, tmp_path: Path) -> None:
    small = package / "model"
    one, other = tmp_path / "one.tgz", tmp_path / "other.tgz"
    for path in (one, other):
        build._pack(small, path)
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes()[:8] == b"\x1f\x8b\x08\0" + build.FIXED_TIME.to_bytes(4, "little")
    names = sorted(path.relative_to(small).as_posix() for path in small.rglob("*"))
    with tarfile.open(one, "r:gz") as tar:
        assert sorted(tar.getnames()) == names


def test_the_archive_does_not_depend_on_place_and_time_of_the_build(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert {member.mtime for member in members} == {build.FIXED_TIME}
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]
    assert not [name for name in names if name.startswith(("site-packages/pyspark", "site-packages/boto3"))]


def test_the_python_of_the_archive_imports_nothing_from_the_machine(
    unpacked: Path, clean: dict[str, str]
) -> None:
    """The Python imports only libraries of the archive: none of .venv, and none of the user."""
    script = """
import importlib.util, sys
for name in ("dormouse", "pyarrow", "datafusion", "datasketches", "psycopg", "botocore", "obstore"):
    assert importlib.import_module(name).__file__.startswith(sys.argv[1]), name
for name in ("pyspark", "moto", "pytest", "pip", "boto3"):
    assert importlib.util.find_spec(name) is None, name
"""
    python = unpacked / "bin" / "python"
    link = unpacked.parent / "link"
    link.symlink_to(python)  # YARN links to the unpacked files
    for command in (python, link):
        done = subprocess.run(
            [command, "-c", script, str(unpacked)],
            env=clean,
            cwd=unpacked.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_without_python_3_11_gets_an_error(unpacked: Path, tmp_path: Path) -> None:
    launcher = (unpacked / "bin" / "python").read_text().replace("/usr", "/nowhere")
    script = tmp_path / "python"
    script.write_text(launcher)
    for tool in ("dirname", "readlink", "sh"):
        found = next(Path(folder) / tool for folder in ("/usr/bin", "/bin") if (Path(folder) / tool).exists())
        (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        [tmp_path / "sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert done.stderr.startswith("Dormouse needs Python 3.11")


def test_a_compaction_needs_only_the_archive_and_spark(
    clean: dict[str, str], instance: Instance, dsn: str, url: str, tmp_path: Path
) -> None:
    tables = [instance.create_table(name, SCHEMA, properties=PROPERTIES) for name in ("DROP_TABLE-x", "b")]
    for number, table in enumerate(tables):
        for start in (0, 1, 2):
            keys = list(range(start, 300, 3))
            table.ingest(pa.table({"key": keys, "name": [f"{number} {key}" for key in keys]}))
    run_id = str(uuid4())
    run = runs.create(instance._supplier, instance._objects, run_id, jobs_max=10, run_seconds=3600)
    assert run.jobs == 2
    listed = f"{url}/runs/{run_id}.json"
    arguments = ["--list", listed, "--dsn", dsn, "--objects", url, "--region", "us-east-1"]
    done = spark_submit(clean, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    for number, table in enumerate(tables):
        [reference] = table.files.file_references()
        assert (reference.row_count, reference.job_id) == (300, None)
        rows = table.query().read_all().to_pylist()
        assert rows == [{"key": key, "name": f"{number} {key}"} for key in range(300)]
    assert runs.report(instance._supplier, instance._objects, run_id, "SUCCEEDED").finished == 2
    # the report deleted the list, so a second start fails
    again = spark_submit(clean, tmp_path, *arguments)
    assert again.returncode == 2
    assert f"there is no list {listed}" in again.stdout  # Spark sends Python's output there


def test_a_run_of_splits_needs_only_the_archive_and_spark(
    clean: dict[str, str], instance: Instance, dsn: str, url: str, tmp_path: Path
) -> None:
    table = instance.create_table("t", SCHEMA, properties=PROPERTIES)
    table.ingest(pa.table({"key": list(range(150)), "name": ["x"] * 150}))
    run_id = str(uuid4())
    tables = (runs.RunTable("t", table.context.table.table_id),)
    runs.write_list(instance._objects, runs.RunList(run_id, "split", tables))
    listed = f"{url}/runs/{run_id}.json"
    done = spark_submit(
        clean, tmp_path, "--list", listed, "--dsn", dsn, "--objects", url, "--region", "us-east-1"
    )
    assert done.returncode == 0, done.stderr
    assert len(table.partitions.leaves()) == 2
    assert table.query().read_all().num_rows == 150
