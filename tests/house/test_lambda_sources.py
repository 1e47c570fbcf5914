"""Lambdas whose packages contain every source file that they import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lambdas.build import DATA, ELSEWHERE, KINDS, OF_CALLS, OF_DATA, ROOT, is_of, source_files

IMPORTS = """
import sys, importlib
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(f"lambdas.{name}")
elsewhere = [m.__file__ for n, m in sys.modules.items()
             if n.partition(".")[0] in ("dormouse", "lambdas") and not m.__file__.startswith(sys.argv[1])]
assert not elsewhere, elsewhere
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_lambdas_of_a_kind_load_from_their_packages_alone(kind: str, tmp_path: Path) -> None:
    for path, source in source_files(ROOT).items():
        if any(is_of(path, name, kind) for name in KINDS[kind]):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, tmp_path / path)
    environment = {**os.environ, "PYTHONPATH": "", "AWS_REGION": "eu-west-1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS, str(tmp_path), *KINDS[kind]],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_source_paths_that_the_build_names_exist() -> None:
    """The build would silently include or omit a file or folder that was moved."""
    parts = {*ELSEWHERE, *OF_CALLS, *(f"{DATA.name}/{name}" for name in OF_DATA)}
    assert [part for part in sorted(parts) if not (DATA.parent / part).exists()] == []
