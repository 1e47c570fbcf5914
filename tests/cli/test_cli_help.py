"""The program's help, shell completion, refusals and questions, and its failures as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer

from dormouse.cli import main, serve
from dormouse.cli.command import Session, confirmed
from dormouse.cli.program import GROUPS, whole
from dormouse.errors import InvalidInput
from dormouse.settings.service import ServiceSettings
from dormouse.state.commits.sqs_queue import SqsQueue


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dormouse", *arguments])
        code = main()
        return code, *capsys.readouterr()

    return run


def test_each_command_is_in_one_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_group(whole()).commands)


def test_the_help_has_the_groups(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert [line.rstrip(":") for line in out.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)


def test_a_failure_with_json_is_one_document(run, tmp_path) -> None:
    code, out, err = run("query", "x", "--instance", str(tmp_path / "none"), "--json")
    assert (code, out) == (1, "")
    assert json.loads(err.splitlines()[-1]) == {
        "error": "NotAnInstance",
        "message": json.loads(err)["message"],
        "exit_code": 1,
    }
    assert str(tmp_path / "none") in json.loads(err)["message"]


def test_a_service_worker_that_cannot_start_uses_the_format_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The worker is a separate process, whose own command line has no `--json`."""
    session = Session(instance=tmp_path / "none", as_json=True)
    monkeypatch.setattr("dormouse.service.supervisor.worker_given", lambda: (session, ServiceSettings()))
    monkeypatch.setattr(serve, "_log_to_stderr", lambda: None)
    with pytest.raises(SystemExit) as ended:
        serve.serve_as_worker()
    found = json.loads(capsys.readouterr().err)
    assert (ended.value.code, found["error"], found["exit_code"]) == (1, "NotAnInstance", 1)


def test_an_invalid_command_line_with_json_is_one_document_too(run) -> None:
    code, _, err = run("query", "--no-such", "--json")
    assert (code, json.loads(err)["error"], json.loads(err)["exit_code"]) == (2, "BadUsage", 2)
    assert run("query", "--no-such")[2].startswith("dormouse: No such option")


@pytest.mark.parametrize(
    "arguments",
    [
        ["jobs", "--instance", "x", "list"],
        ["jobs", "--limit", "3", "show", "0198c0de-0000-7000-8000-000000000000"],
        *(
            ["restore", "--instance", "prod", "--to", "2026-11-20 14:00", *more]
            for more in (["--check"], ["--into", "x"], ["--backup", "x"], ["--despite-damage"])
        ),
        *(
            ["restore", "backups", "--into", "x", *more]
            for more in (["--commits", "purge"], ["--region", "eu-west-1"], ["--profile", "x"])
        ),
    ],
)
def test_an_option_without_effect_is_refused(run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert " need " in err or "options go after the command" in err


@pytest.mark.parametrize(("typed", "agrees"), [("y\n", True), ("n\n", False), ("", False)])
def test_the_end_of_the_input_is_no_agreement(
    monkeypatch: pytest.MonkeyPatch, typed: str, agrees: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert confirmed("Make it?", default=True) is agrees


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "_DORMOUSE_COMPLETE" in out
    assert run("completion", "csh")[0] == 2


def test_a_queue_without_a_region_is_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(InvalidInput, match="has no region: set AWS_REGION"):
        SqsQueue("https://example.invalid/1/queue").depth()
