"""Tests of `app.py`: equal output on all machines, and clear lines for mistakes."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import main
from tests.assembly import ROOT

RunHere = Callable[..., tuple[int, str]]
PACKAGES = ("commit", "compaction", "garbage", "maintenance", "migrate", "pause", "runs", "tables")
SAYS_WHERE = ".metadata.json"
"""The suffix of files with the CDK's traces of constructs, which contain the path of a temporary folder."""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Returns a copy of the checkout, with empty packages in place of those that `make` builds."""
    root = tmp_path / "checkout"
    root.mkdir()
    for folder in ("dormouse", "stacks", "config"):
        (root / folder).symlink_to(ROOT / folder)
    for file in ("app.py", "cdk.json"):
        shutil.copy(ROOT / file, root)
    for package in PACKAGES:
        file = root / f"build/lambdas/{package}-arm64/lambdas/{package}.py"
        file.parent.mkdir(parents=True)
        file.write_text("def handler(event, context): ...\n", "utf-8")
    archive = root / "build/emr/dormouse-arm64.tgz"
    archive.parent.mkdir()
    archive.write_bytes(b"archive")
    image = root / "build/query-image/Dockerfile"
    image.parent.mkdir()
    image.write_text("FROM scratch\n", "utf-8")
    return root


def run(
    root: Path, cwd: Path, outdir: Path, config: str | None, *arguments: str, **environment: str
) -> tuple[int, str]:
    """Runs `python app.py` as the CDK's CLI does; returns the exit code and the text of stderr."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("CDK_", "JSII_", "AWS_"))
    }
    named = {} if config is None else {"config": config}
    context = {"CDK_OUTDIR": str(outdir), "CDK_CONTEXT_JSON": json.dumps(named)}
    done = subprocess.run(
        [sys.executable, str(root / "app.py"), *arguments],
        cwd=cwd,
        env=inherited | context | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def run_here(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> RunHere:
    """Returns a function that runs `app.py` in this process, and returns the exit code and stderr.

    This is faster than a new process, because Node has already loaded the CDK.
    """
    from stacks.instance import new_app

    app = new_app(str(tmp_path / "out"))
    monkeypatch.setattr("app.ROOT", built)
    monkeypatch.setattr("stacks.instance.new_app", lambda _outdir: app)
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.chdir(built)

    def run_with(config: str | None, **more: str) -> tuple[int, str]:
        context = more if config is None else {"config": config, **more}
        for name, value in context.items():
            app.node.set_context(name, value)
        code = main()
        out, err = capfd.readouterr()
        assert out == ""
        return code, err

    return run_with


@pytest.mark.slow
def test_two_synths_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """The second synth has another time zone, user, folder and checkout."""
    other = tmp_path / "other" / "place"
    shutil.copytree(built, other, copy_function=shutil.copy, ignore=shutil.ignore_patterns("__pycache__"))
    one, two = tmp_path / "one", tmp_path / "two"
    home = tmp_path / "home"
    home.mkdir()
    config = str(built / "config/prod.toml")
    assert run(built, built, one, config, TZ="UTC") == (0, "")
    assert run(
        other, tmp_path, two, config, TZ="Asia/Kolkata", HOME=str(home), USER="someone", LANG="de_DE.UTF-8"
    ) == (0, "")
    files = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert files == sorted(str(path.relative_to(two)) for path in two.rglob("*") if path.is_file())
    compared = [name for name in files if not name.endswith(SAYS_WHERE)]
    assert len([name for name in compared if name.endswith(".template.json")]) == 5
    assert filecmp.cmpfiles(one, two, compared, shallow=False)[1:] == ([], [])


def test_templates_have_the_paths_of_constructs_and_cdk_json_no_key_that_the_cdk_reserves(
    built: Path, tmp_path: Path, run_here: RunHere
) -> None:
    """The CDK's CLI warns of each key that begins with aws: in the context of cdk.json."""
    settings = json.loads((ROOT / "cdk.json").read_text("utf-8"))
    assert not [key for key in settings["context"] if key.startswith("aws:")]
    assert settings["pathMetadata"] is True
    assert run_here("config/minimal.toml") == (0, "")
    template = json.loads((tmp_path / "out/dormouse-minimal-storage.template.json").read_text("utf-8"))
    assert template["Resources"]["Data666C94C7"]["Metadata"]["aws:cdk:path"].endswith("/Data/Resource")


NOT_BUILT = "placeholders stand in for files that are not built, so a deploy is refused: run "


def test_a_missing_package_has_a_placeholder_and_a_hint_how_to_build_it(
    built: Path, tmp_path: Path, run_here: RunHere
) -> None:
    shutil.rmtree(built / "build/lambdas/commit-arm64")
    assert run_here("config/dev.toml") == (0, f"{NOT_BUILT}make lambdas\n")
    assert (tmp_path / "out/dormouse-dev-application.template.json").exists()


@pytest.mark.slow
def test_all_missing_packages_are_named_and_no_stack_that_needs_them_deploys(
    built: Path, tmp_path: Path, run_here: RunHere
) -> None:
    """A placeholder for a missing package has a command that fails.

    The CDK's CLI runs the command before it deploys the stack.
    """
    shutil.rmtree(built / "build")
    path = tmp_path / "intel.toml"
    path.write_text(
        'id = "intel"\narchitecture = "x86_64"\n[compaction]\nengine = "emr-serverless"\n[query]\n', "utf-8"
    )
    output = f"{NOT_BUILT}make lambdas, make query-image, make emr-package ARCHITECTURE=x86_64\n"
    assert run_here(str(path)) == (0, output)
    assets = sorted((tmp_path / "out").glob("*.assets.json"))
    assert len(assets) == 5
    for one in assets:
        content = json.loads(one.read_text("utf-8"))
        [command] = [
            file["source"]["executable"]
            for file in content["files"].values()
            if "executable" in file["source"]
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, output)
        assert not content.get("dockerImages")


def test_built_packages_are_not_refused(built: Path, tmp_path: Path, run_here: RunHere) -> None:
    assert run_here("config/prod.toml") == (0, "")
    for one in (tmp_path / "out").glob("*.assets.json"):
        assert "executable" not in one.read_text("utf-8")


@pytest.mark.slow
def test_an_incomplete_checkout_is_one_line(built: Path, run_here: RunHere) -> None:
    (built / "dormouse").unlink()
    (built / "dormouse").mkdir()
    assert run_here("config/dev.toml") == (2, "dormouse/spark/run.py is missing: the checkout is not whole\n")


@pytest.mark.slow
def test_destroying_an_instance_needs_no_packages(built: Path, tmp_path: Path, run_here: RunHere) -> None:
    shutil.rmtree(built / "build")
    assert run_here("config/minimal.toml", packages="none") == (0, "")
    assert (tmp_path / "out" / "dormouse-minimal-application.template.json").exists()
    for one in (tmp_path / "out").glob("*.assets.json"):
        assert "with packages=none there is nothing to deploy" in one.read_text("utf-8")


@pytest.mark.slow
def test_the_default_file_is_that_of_the_checkout(
    built: Path, tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory does not matter."""
    monkeypatch.chdir(tmp_path)
    assert run_here(None) == (0, "")
    assert (tmp_path / "out/dormouse-dev-application.template.json").exists()


def test_an_argument_is_refused_and_not_ignored(built: Path, tmp_path: Path) -> None:
    code, output = run(built, built, tmp_path / "out", None, "-c", "config=config/prod.toml")
    assert (code, output) == (2, "app.py takes no arguments: use npx cdk synth -c config=…\n")


def test_a_region_of_the_credentials_without_certificates_is_refused_by_name(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDK_DEFAULT_REGION", "il-central-1")
    code, output = run_here("config/dev.toml")
    assert code == 2
    assert output.startswith("the certificates of Amazon RDS in il-central-1 are not in rds-ca-bundle.pem: ")


@pytest.mark.slow
def test_a_resource_that_a_region_lacks_is_an_error_without_traceback(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDK's CLI later prints the reason, which it finds in the validation report."""
    monkeypatch.setattr("dormouse.settings.section._regions", lambda _: {"us-gov-west-1"})
    path = tmp_path / "government.toml"
    where = 'account = "123456789012"\nregion = "us-gov-west-1"'
    path.write_text(f'id = "gov"\n{where}\n[monitoring]\nbudget_usd_month = 5\n', "utf-8")
    assert run_here(str(path)) == (2, "")
    assert "AWS::Budgets::Budget" in (tmp_path / "out/validation-report.json").read_text("utf-8")


def test_all_mistakes_in_the_settings_are_reported_at_once(tmp_path: Path, run_here: RunHere) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('id = "Dev"\n[database]\nkind = "serverless"\nmin_acu = 0.3\n[comit]\n', "utf-8")
    code, output = run_here(str(path))
    assert code == 2
    assert {line.partition(" ")[0] for line in output.splitlines()} == {f"{path}:"}
    for part in ("id", "min_acu", "did you mean commit?"):
        assert part in output
    assert "Traceback" not in output
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_missing_file_is_one_line(run_here: RunHere) -> None:
    code, output = run_here("config/pord.toml")
    assert (code, output) == (2, "there is no file config/pord.toml; did you mean config/prod.toml?\n")


def test_the_lock_names_no_host() -> None:
    """The lock file names no registry but npm's own, and pins the CDK's version of package.json."""
    lock = (ROOT / "package-lock.json").read_text("utf-8")
    version = json.loads((ROOT / "package.json").read_text("utf-8"))["devDependencies"]["aws-cdk"]
    assert "resolved" not in lock or "https://registry.npmjs.org/" in lock
    assert json.loads(lock)["packages"]["node_modules/aws-cdk"]["version"] == version


@pytest.mark.slow
def test_a_separate_process_reads_its_context_from_the_environment(built: Path, tmp_path: Path) -> None:
    shutil.rmtree(built / "build")
    context = json.dumps({"config": "config/minimal.toml", "packages": "none"})
    assert run(built, built, tmp_path / "out", None, CDK_CONTEXT_JSON=context) == (0, "")
    assert (tmp_path / "out" / "dormouse-minimal-application.template.json").exists()
