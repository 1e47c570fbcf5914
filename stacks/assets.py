"""The files that a deployment uploads.

Synth packs the files that `make lambdas`, `make emr-package` and `make query-image` built.
Placeholders stand in for missing files, so that templates can be viewed without a build.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aws_cdk as cdk
from aws_cdk import aws_ecr_assets as ecr_assets
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from dormouse.errors import InvalidInput

Architecture = Literal["arm64", "x86_64"]
MIGRATIONS = (
    "dormouse/postgres/migrations/*.sql",
    "dormouse/postgres/roles.*",
    "dormouse/aws/schedules/migration.*",
)
PLATFORMS = {"arm64": ecr_assets.Platform.LINUX_ARM64, "x86_64": ecr_assets.Platform.LINUX_AMD64}
STUB = "Stands in for what is built."
NOT_BUILT = "not-built"
"""The name of the image that stands in for one that is not built."""


class Assets:
    """The files that a deployment uploads. Without a build, they are placeholders, written to `folder`.

    `to_run` has the commands that build the missing files, such as `make lambdas`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.to_run: list[str] = []

    def lambda_code(self, package: str) -> lambda_.Code:
        """Returns the code of a lambda package, such as `commit`."""
        return lambda_.Code.from_asset(str(self._stub(package, "handler.py").parent))

    def emr_package(self, scope: Construct) -> s3_assets.Asset:
        """Returns the archive with the Python environment that Spark runs."""
        return s3_assets.Asset(scope, "EmrPackage", path=str(self._stub("emr", "package.tgz")))

    def emr_entry(self, scope: Construct) -> s3_assets.Asset:
        """Returns the script that Spark starts."""
        return s3_assets.Asset(scope, "EmrEntry", path=str(self._stub("emr", "run.py")))

    def query_image(self, scope: Construct) -> ecs.ContainerImage:
        """Returns the image of the query service."""
        folder = str(self._stub("query-image", "Dockerfile").parent)
        image = ecr_assets.DockerImageAsset(scope, "Image", directory=folder)
        return ecs.ContainerImage.from_docker_image_asset(image)

    def migrations(self) -> str:
        """Returns a text that changes whenever the migrations of the database change."""
        return STUB

    def _stub(self, folder: str, name: str) -> Path:
        path = self._folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {STUB} {folder}\n", "utf-8")
        return path


@dataclass(frozen=True)
class Builder:
    """A command that builds files. It takes the name of a part, and after `option` the architecture."""

    command: str
    option: str


MAKE = Builder("make", "ARCHITECTURE=")


class BuiltAssets(Assets):
    """The built files in the folder `build`, and placeholders in the folder `stubs` for missing files.

    By default, `build` is the folder of this name in `root`. `root` contains the package `dormouse`.
    """

    def __init__(
        self,
        root: Path,
        architecture: Architecture,
        stubs: Path,
        *,
        build: Path | None = None,
        builder: Builder = MAKE,
    ) -> None:
        super().__init__(stubs)
        self._root = root
        self._build = build or root / "build"
        self._builder = builder
        self._architecture = architecture

    def lambda_code(self, package: str) -> lambda_.Code:
        path = self._built(f"lambdas/{package}-{self._architecture}", "lambdas")
        return lambda_.Code.from_asset(str(path)) if path else super().lambda_code(package)

    def emr_package(self, scope: Construct) -> s3_assets.Asset:
        # Not .tar.gz: the CDK keeps only the last suffix, and Spark does not unpack files that end in .gz.
        part = f"emr-package {self._builder.option}{self._architecture}"
        path = self._built(f"emr/dormouse-{self._architecture}.tgz", part)
        if path is None:
            return super().emr_package(scope)
        return s3_assets.Asset(scope, "EmrPackage", path=str(path))

    def emr_entry(self, scope: Construct) -> s3_assets.Asset:
        path = self._root / "dormouse/spark/run.py"
        if not path.exists():
            raise InvalidInput("dormouse/spark/run.py is missing: the checkout is not whole")
        return s3_assets.Asset(scope, "EmrEntry", path=str(path))

    def query_image(self, scope: Construct) -> ecs.ContainerImage:
        path = self._built("query-image", "query-image")
        if path is None:  # no stub: a deploy would build its image with Docker before it is refused
            return ecs.ContainerImage.from_registry(NOT_BUILT)
        platform = PLATFORMS[self._architecture]
        image = ecr_assets.DockerImageAsset(scope, "Image", directory=str(path), platform=platform)
        return ecs.ContainerImage.from_docker_image_asset(image)

    def migrations(self) -> str:
        digest = hashlib.sha256()
        for pattern in MIGRATIONS:
            for path in sorted(self._root.glob(pattern)):
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()

    def _built(self, relative: str, part: str) -> Path | None:
        path = self._build / relative
        if path.exists():
            return path
        if (command := f"{self._builder.command} {part}") not in self.to_run:
            self.to_run.append(command)
        return None


def refuse_deploys(app: Construct, why: str) -> None:
    """Makes deploys of all stacks of the app fail with the line `why`. Other commands still work.

    A deploy uploads files before it creates a stack. So each stack gets a file that a command must build.
    This command prints `why` and fails.
    """
    for stack in app.node.children:
        if isinstance(stack, cdk.Stack):
            stack.synthesizer.add_file_asset(
                executable=["sh", "-c", 'echo "$0" >&2; exit 1', why],
                source_hash=hashlib.sha256(why.encode()).hexdigest(),
            )
