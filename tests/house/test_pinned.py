"""Actions and base images, all pinned by a hash, because their owners can move a tag to other content."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from packages import SPARK, closure, requirements

ROOT = Path(__file__).parents[2]
WORKFLOWS = [*sorted((ROOT / ".github").rglob("*.y*ml")), ROOT / "docs" / "how-to" / "deploy-from-ci.md"]
DOCKERFILES = [ROOT / "query_image" / "Dockerfile"]
HEALTHY = ROOT / "query_image" / "healthy"
SECONDS_MAX = 60


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_with_the_version_beside_it(path: Path) -> None:
    used = re.findall(r"^\s*(?:- )?uses:(.*)$", path.read_text("utf-8"), re.M)
    assert used
    pinned = re.compile(r" [\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert [line for line in used if not pinned.fullmatch(line)] == []


def test_the_lists_of_workflows_and_dockerfiles_are_complete() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / line for line in done.stdout.splitlines()]
    texts = [path for path in tracked if path.suffix in {".md", ".yml", ".yaml"} and path.is_file()]
    using = [path for path in texts if re.search(r"^\s*(?:- )?uses: \S+/", path.read_text("utf-8"), re.M)]
    assert sorted(using) == sorted(WORKFLOWS)
    assert [path for path in tracked if "Dockerfile" in path.name] == DOCKERFILES


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_base_images_are_pinned_to_a_digest(path: Path) -> None:
    bases = re.findall(r"^FROM (\S+)", path.read_text("utf-8"), re.M)
    assert bases
    assert [base for base in bases if not re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", base)] == []


def test_ci_audits_the_packages_that_are_installed() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert "run: make audit" in workflow
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\naudit:")[2].partition("\n\n")[0]
    assert "pip-audit --requirement requirements.txt" in recipe
    assert "npm audit" in recipe


def test_the_demo_installs_what_its_extras_need() -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8")
    [listed] = re.findall(r"^DEMO_PACKAGES = ((?:.*\\\n)*.*)", recipe, re.M)
    extras = requirements(ROOT, "local", "spark", "demo", "sql", "rows", "service", "client")
    assert {*listed.replace("\\\n", " ").split()} == closure(extras, SPARK)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """Starts a server that answers GET /health with a status; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def checked(port: int) -> tuple[int, str]:
    """Returns the exit status and the message of the image's health check."""
    variables = {"DORMOUSE_SERVICE_HOST": "0.0.0.0", "DORMOUSE_SERVICE_PORT": str(port)}  # noqa: S104
    proxy = {"http_proxy": "http://127.0.0.1:1"}  # the check must not use the proxy
    command = [sys.executable, str(HEALTHY)]
    environment = {**os.environ, **variables, **proxy}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_the_health_check_of_the_image_fails_unless_the_service_answers() -> None:
    with answering(200) as port:
        assert checked(port) == (0, "")
    code, message = checked(port)
    assert (code, message.count("\n")) == (1, 1)
    assert message.startswith(f"the service does not answer on 127.0.0.1:{port}: ")
    with answering(503) as port:
        assert checked(port) == (1, f"the service on 127.0.0.1:{port} answered with status 503\n")
