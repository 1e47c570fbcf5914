"""The files that a deployment uploads: synth only packs what `make lambdas`, `make emr-package` and `make
query-image` built."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, Protocol

from aws_cdk import aws_ecr_assets as ecr_assets
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from dormouse.errors import InvalidInput

Architecture = Literal["arm64", "x86_64"]
MIGRATIONS = (
    "dormouse/postgres/migrations/*.sql",
    "dormouse/postgres/roles.*",
    "dormouse/schedules/migration.*",
)
PLATFORMS = {"arm64": ecr_assets.Platform.LINUX_ARM64, "x86_64": ecr_assets.Platform.LINUX_AMD64}
STUB = "Stands in for what is built."


class Assets(Protocol):
    def lambda_code(self, package: str) -> lambda_.Code:
        """The code of a lambda package, as `commit`."""

    def emr_package(self, scope: Construct) -> s3_assets.Asset:
        """The archive with the Python environment that Spark runs."""

    def emr_entry(self, scope: Construct) -> s3_assets.Asset:
        """The script that Spark starts with."""

    def query_image(self, scope: Construct) -> ecr_assets.DockerImageAsset:
        """The image of the query service."""

    def migrations(self) -> str:
        """A text that changes when there is something to migrate."""


class BuiltAssets:
    """What is built in a folder that has `build/`; raises InvalidInput, with what to run, for what is not."""

    def __init__(self, root: Path, architecture: Architecture) -> None:
        self._root = root
        self._architecture = architecture

    def lambda_code(self, package: str) -> lambda_.Code:
        return lambda_.Code.from_asset(
            self._path(f"build/lambdas/{package}-{self._architecture}", "run make lambdas")
        )

    def emr_package(self, scope: Construct) -> s3_assets.Asset:
        # Not .tar.gz: of an asset's name S3 keeps the last part, and Spark unpacks nothing that ends in .gz.
        remedy = f"run make emr-package ARCHITECTURE={self._architecture}"
        path = self._path(f"build/emr/dormouse-{self._architecture}.tgz", remedy)
        return s3_assets.Asset(scope, "EmrPackage", path=path)

    def emr_entry(self, scope: Construct) -> s3_assets.Asset:
        path = self._path("dormouse/spark/run.py", "the checkout is not whole")
        return s3_assets.Asset(scope, "EmrEntry", path=path)

    def query_image(self, scope: Construct) -> ecr_assets.DockerImageAsset:
        folder = self._path("build/query-image", "run make query-image")
        platform = PLATFORMS[self._architecture]
        return ecr_assets.DockerImageAsset(scope, "Image", directory=folder, platform=platform)

    def migrations(self) -> str:
        digest = hashlib.sha256()
        for pattern in MIGRATIONS:
            for path in sorted(self._root.glob(pattern)):
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()

    def _path(self, relative: str, remedy: str) -> str:
        path = self._root / relative
        if not path.exists():
            raise InvalidInput(f"{relative} is missing: {remedy}")
        return str(path)


class StubAssets:
    """The same files with nothing in them, for tests; `folder` is one to write to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lambda_code(self, package: str) -> lambda_.Code:
        return lambda_.Code.from_asset(str(self._file(package, "handler.py").parent))

    def emr_package(self, scope: Construct) -> s3_assets.Asset:
        return s3_assets.Asset(scope, "EmrPackage", path=str(self._file("emr", "package.tgz")))

    def emr_entry(self, scope: Construct) -> s3_assets.Asset:
        return s3_assets.Asset(scope, "EmrEntry", path=str(self._file("emr", "run.py")))

    def query_image(self, scope: Construct) -> ecr_assets.DockerImageAsset:
        folder = str(self._file("query-image", "Dockerfile").parent)
        return ecr_assets.DockerImageAsset(scope, "Image", directory=folder)

    def migrations(self) -> str:
        return STUB

    def _file(self, folder: str, name: str) -> Path:
        path = self._folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {STUB} {folder}\n", "utf-8")
        return path
