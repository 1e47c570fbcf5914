"""What pyproject.toml cannot say: the wheel also has `dormouse_cdk`, for CDK apps of others.

It is the folder stacks/ under a name that collides with no folder of theirs, and within it, as files, what
uploads are built from.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NAME = "dormouse_cdk"
FOLDERS = ("lambdas", "emr", "query_image", "packages")
FILES = ("cdk.json", "pyproject.toml", "requirements.txt")
OURS = re.compile(r"^(\s*(?:from|import) )stacks\b", re.MULTILINE)


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            make_cdk(Path(self.build_lib))


def make_cdk(target: Path) -> None:
    """Makes `dormouse_cdk` in the folder `target`, in place of one that is there."""
    made, leave = target / NAME, shutil.ignore_patterns("__pycache__")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(ROOT / "stacks", made, ignore=leave)
    for path in made.rglob("*.py"):
        path.write_text(OURS.sub(rf"\1{NAME}", path.read_text("utf-8")), "utf-8")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, made / "sources" / folder, ignore=leave)
    for name in FILES:
        shutil.copyfile(ROOT / name, made / "sources" / name)


if __name__ == "__main__":
    setup(cmdclass={"build_py": Build})
