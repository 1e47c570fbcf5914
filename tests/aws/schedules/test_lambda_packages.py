"""The packages that `make lambdas` builds: they are small, reproducible and complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import dormouse as dm
from lambdas import build
from lambdas.build import KINDS, LIBRARIES, PACKAGES, ROOT, cold_import, native, tree_bytes
from packages import LAMBDA, Architecture, Runtime, interpreter, pins
from query_image import build as image
from tests.aws.schedules.test_commit_lambda import record
from tests.binaries import lacking
from tests.built import copy_sources
from tests.commits import add
from tests.standard import OF_KEYS

MODULES_MAX = 810
SIZE_BYTES_MAX = {"database": 64 * 1024 * 1024, "calls": 20 * 1024 * 1024}
"""The limits on bytes, by kind of package. Within them, a cold import takes less than a second."""


@pytest.fixture
def python() -> Path:
    """Returns the path of a Python of the lambdas' version; skips the test if there is none."""
    if (found := interpreter(LAMBDA)) is None:
        pytest.skip(build.NO_PYTHON)
    return found


@pytest.fixture
def target(built_lambdas: Callable[[Architecture], Path]) -> Path:
    """Returns the folder of packages built for this machine's processor."""
    return built_lambdas(native()) / "lambdas"


def package(target: Path, name: str) -> Path:
    return target / f"{name}-{native()}"


def fingerprint(folder: Path) -> str:
    """Returns a digest of the names, modes, times and bytes of all files: those that an archive stores."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        line = f"{path.relative_to(folder)} {status.st_mode:o} {status.st_mtime_ns}\n"
        digest.update(line.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_packages_contain_the_requirements_of_their_libraries(kind: str) -> None:
    known = {*LIBRARIES[kind], "botocore"}  # the runtime provides botocore
    for name in LIBRARIES[kind]:
        for needed in metadata.requires(name) or []:
            if "extra ==" not in needed and "sys_platform" not in needed and "python_version" not in needed:
                library = needed.split(";")[0].split("[")[0].split("<")[0].split(">")[0].split("=")[0].strip()
                assert library.lower().replace("_", "-") in known, f"{name} needs {needed}"


def test_a_library_without_a_pin_is_named() -> None:
    found = "\n".join(pins((ROOT / "requirements.txt").read_text("utf-8"), LIBRARIES["database"]))
    with pytest.raises(dm.DormouseError, match=r"does not pin obstore: run make requirements"):
        pins(found.replace("obstore==", "other=="), LIBRARIES["database"])


def test_every_path_that_packaging_names_exists() -> None:
    """Checks the paths that packages leave out, and those of migrations: a folder may have been moved."""
    from stacks.assets import MIGRATIONS

    for name in (*build.ELSEWHERE, *build.OF_CALLS, *image.ELSEWHERE):
        assert (ROOT / "dormouse" / name).exists(), name
    for pattern in MIGRATIONS:
        assert [*ROOT.glob(pattern)], pattern


def test_a_python_that_does_not_start_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `python3.99` on the path may be a stub of pyenv, which fails if another version is chosen."""
    runtime = Runtime("3.99.0", 34)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreter.__wrapped__(runtime) is None
    kept = tmp_path / ".pyenv/versions/3.99.2/bin/python3.99"
    for path, code in ((tmp_path / "python3.99", 127), (kept, 0)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    assert interpreter.__wrapped__(runtime) == kept
    (tmp_path / "python3.99").write_text("#!/bin/sh\nexit 0\n")
    assert interpreter.__wrapped__(runtime) == tmp_path / "python3.99"


def test_a_build_without_the_python_of_the_lambdas_warns_of_slow_cold_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packages.interpreter", lambda runtime: None)
    monkeypatch.setattr(build, "build", lambda *given: False)
    assert build.main(["--architecture", "arm64", "--measure"]) == 1
    out, err = capsys.readouterr()
    assert f"bytecode is left out, so cold starts take longer: {build.NO_PYTHON}" in out
    assert err == f"error: the packages cannot be tried: {build.NO_PYTHON}\n"


def test_lambdas_that_only_call_aws_import_no_database() -> None:
    names = [f"lambdas.{name}" for name in KINDS["calls"]]
    script = f"""
import {", ".join(names)}, sys
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("dormouse.")))
print(*{{"psycopg", "obstore", "msgspec", "pyarrow"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    files, heavy = done.stdout.splitlines()
    sources = [Path(one).relative_to(ROOT) for one in files.split()]
    assert sources and not [one for one in sources if not build.is_of(one, "", build.CALLS)]
    assert heavy == ""


@pytest.mark.slow
def test_each_package_is_small_and_imports_few_modules(python: Path, target: Path) -> None:
    for kind, names in KINDS.items():
        for name in names:
            folder = package(target, name)
            assert tree_bytes(folder) < SIZE_BYTES_MAX[kind]
            assert cold_import(folder, f"lambdas.{name}").modules < MODULES_MAX


def answers(name: str) -> list[str]:
    return ["answers"] if name in build.OF_CUSTOM_RESOURCES else []


@pytest.mark.slow
def test_each_package_has_exactly_the_modules_that_it_needs(lambda_sources: Path, target: Path) -> None:
    for name in KINDS["database"]:
        folder = package(target, name)
        modules = {path.stem for path in (folder / "lambdas").glob("*.py")}
        assert modules == {"__init__", "services", "database", name, *answers(name)}
        for wanted in ("postgres/rds-ca-bundle.pem", "state/files/store.sql", "postgres/roles.sql"):
            assert (folder / "dormouse" / wanted).is_file()
        migrations = sorted(
            path.name for path in (lambda_sources / "dormouse/postgres/migrations").glob("*.sql")
        )
        packed = sorted(path.name for path in (folder / "dormouse/postgres/migrations").iterdir())
        assert packed == migrations
    for name in KINDS["calls"]:
        folder = package(target, name)
        modules = {path.stem for path in (folder / "lambdas").glob("*.py")}
        assert modules == {"__init__", "services", name, *answers(name)}
        rooms = {one.partition("/")[0] for one in build.OF_CALLS}
        assert {path.name for path in (folder / "dormouse").iterdir()} == {*rooms, "__pycache__"}
        parts = [folder / "dormouse" / room for room in ("model", "state")]
        packed = {str(path.relative_to(folder / "dormouse")) for part in parts for path in part.rglob("*.py")}
        assert packed == {one for one in build.OF_CALLS if "/" in one}
        assert not {path.name for path in folder.iterdir()} & {
            "psycopg",
            "psycopg_binary",
            "obstore",
            "msgspec",
        }
    for name in PACKAGES:
        folder = package(target, name)
        top = {path.name for path in folder.iterdir()}
        assert not top & {"boto3", "botocore", "pyarrow", "pyspark", "datafusion", "numpy", "bin", "tests"}
        assert not [path for path in folder.rglob("*") if path.suffix == ".pyi"]


@pytest.mark.slow
def test_every_module_is_compiled_for_the_python_of_the_lambdas(python: Path, target: Path) -> None:
    tag = f"cpython-{LAMBDA.python.replace('.', '')}"
    for name in PACKAGES:
        folder = package(target, name)
        for path in folder.rglob("*.py"):
            assert (path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc").is_file()
        assert {path.name.split(".")[1] for path in folder.rglob("*.pyc")} == {tag}


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(lambda_sources: Path, target: Path, tmp_path: Path) -> None:
    """The second build uses another folder and another time, and downloads the libraries again."""
    copy_sources(lambda_sources, tmp_path / "elsewhere")
    assert build.build(tmp_path / "elsewhere", tmp_path, native())
    for name in PACKAGES:
        assert fingerprint(package(tmp_path / "lambdas", name)) == fingerprint(package(target, name))


@pytest.mark.slow
def test_packages_are_rebuilt_only_after_a_change(
    lambda_sources: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sources(lambda_sources, tmp_path / "root")
    root = tmp_path / "root"
    shutil.copytree(target.parent, tmp_path / "build", copy_function=os.link)
    monkeypatch.setattr("packages.install", None)  # a download would now fail
    assert not build.build(root, tmp_path / "build", native())
    garbage = package(tmp_path / "build/lambdas", "garbage")
    before = fingerprint(garbage)
    with (root / "lambdas/commit.py").open("a") as file:
        file.write("# changed\n")
    assert build.build(root, tmp_path / "build", native())
    assert fingerprint(garbage) == before
    assert "# changed" in (package(tmp_path / "build/lambdas", "commit") / "lambdas/commit.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["arm64", "x86_64"])
def test_the_runtime_has_the_libraries_that_binaries_need(
    architecture: Architecture, built_lambdas: Callable[[Architecture], Path]
) -> None:
    """Checks that the runtime has the libraries of the binaries, with the symbol versions that they need."""
    target = built_lambdas(architecture) / "lambdas"
    for name in PACKAGES:
        assert list(lacking(target / f"{name}-{architecture}", architecture)) == []


@pytest.mark.slow
def test_the_commit_lambda_needs_only_its_package(
    python: Path, target: Path, dsn: str, tmp_path: Path
) -> None:
    url = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, url) as instance:
        instance.create_table("t", OF_KEYS)
        event = json.dumps({"Records": [record("1", add("t", "a")), record("2", "nonsense")]})
        script = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "site-packages" not in p), sys.argv[2]]
import json
from lambdas.commit import handler
print("ANSWER " + json.dumps(handler(json.loads(sys.argv[3]), None)))
"""
        runtime = tmp_path / "runtime"
        runtime.mkdir()
        build.link_boto3(runtime)
        done = subprocess.run(
            [python, "-I", "-S", "-c", script, package(target, "commit"), runtime, event],
            env={**os.environ, "DORMOUSE_DSN": dsn, "DORMOUSE_OBJECTS": url},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
        assert json.loads(answer.removeprefix("ANSWER ")) == {"batchItemFailures": [{"itemIdentifier": "2"}]}
        assert instance.commit_status("add a").state == "applied"
