"""Names that other programs import, which must stay importable when their module moves."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "dormouse": "connect local restore backups Schema Field Range TableProperties LONG Insert Patch ALL",
    "dormouse.errors": "DormouseError InvalidInput TableNotFound CommitIdReused InstanceError",
    "dormouse.client": "Client connect",
    "dormouse.spark": "",
    "dormouse.spark.session": "spark_session",
    "dormouse.datasource.job": "main",
    "pyspark_dormouse": "",
    "dormouse.model.file_reference": "FileReference FileWithReferences AssignJobIdRequest "
    "ReplaceFileReferencesRequest SplitFileReferenceRequest CheckAssignmentRequest",
    "dormouse.commits.requests": "AddFiles AssignJobIds SplitFileReferences ReplaceFileReferences "
    "DeleteCollectedFiles SplitPartition EditTables TableEdit CommitRequest Envelope",
    "dormouse.postgres": "migrate ConnectionSupplier",
    "dormouse.postgres.migrate": "migrate",
    "dormouse.system.restore": "restore_objects",
    "dormouse.system.instance": "DeployedInstance",
    "dormouse.system.aws": "Aws AwsRefused open_session",
    "dormouse.settings.resources": "",
    "dormouse.objects.folder": "",
    "dormouse.embedded.postgres": "EmbeddedPostgres",
}
"""The modules, with the names that documents and examples import from them."""


@pytest.mark.parametrize("module", NAMES)
def test_names_that_other_programs_import_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(loaded, name)] == []


def test_a_class_is_the_same_under_its_old_module() -> None:
    old, new = map(importlib.import_module, ("dormouse.commits.requests", "dormouse.state.commits.requests"))
    assert old.AddFiles is new.AddFiles


def test_the_package_has_every_error_class() -> None:
    package, errors = map(importlib.import_module, ("dormouse", "dormouse.errors"))
    kinds = [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 90 and [name for name in kinds if not hasattr(package, name)] == []
