"""The build steps that pyproject.toml cannot express: the wheel also has `dormouse_cdk`, for other CDK apps.

`dormouse_cdk` is the folder stacks/ under a name that collides with no folder of such an app. It contains the
sources of the uploads as files. The variable `DORMOUSE_REPOSITORY=https://…` sets the repository for the
links of the README and of the package index. A release sets it; a build of a checkout does not need it.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NAME = "dormouse_cdk"
FOLDERS = ("lambdas", "emr", "query_image", "packages")
FILES = ("cdk.json", "pyproject.toml", "requirements.txt")
OURS = re.compile(r"^(\s*(?:from|import) )stacks\b", re.MULTILINE)


LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s]+\))")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
REPOSITORY = os.environ.get("DORMOUSE_REPOSITORY", "").rstrip("/")


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            make_cdk(Path(self.build_lib))


def make_cdk(target: Path) -> None:
    """Makes `dormouse_cdk` in the folder `target`, and replaces an existing one."""
    made, leave = target / NAME, shutil.ignore_patterns("__pycache__")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(ROOT / "stacks", made, ignore=leave)
    for path in made.rglob("*.py"):
        path.write_text(OURS.sub(rf"\1{NAME}", path.read_text("utf-8")), "utf-8")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, made / "sources" / folder, ignore=leave)
    for name in FILES:
        shutil.copyfile(ROOT / name, made / "sources" / name)


def readme(repository: str) -> str:
    """Returns the README for a package index: its links lead to the release's files in the repository."""
    text = COMMENT.sub("", (ROOT / "README.md").read_text("utf-8"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return LINK.sub(rf"\1{repository}/blob/v{version}/\2", text) if repository else text


def urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    pages = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Repository": repository, **{name: f"{repository}/{path}" for name, path in pages.items()}}


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": Build},
        long_description=readme(REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
    )
