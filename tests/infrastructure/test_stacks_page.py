"""The page of the stacks is what the templates say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stacks.diagram import draw
from tests.assembly import Assembly

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stacks.md"


def test_the_page_is_what_is_deployed(synthesized: Callable[[str], Assembly]) -> None:
    drawn = draw(synthesized("prod").templates)
    assert f"```mermaid\n{drawn}```\n" in PAGE.read_text("utf-8"), "run: make docs"


def test_messages_jobs_and_failures_are_drawn(synthesized: Callable[[str], Assembly]) -> None:
    lines = {line.strip() for line in draw(synthesized("prod").templates).splitlines()}
    assert {
        "commit_Commits1Queue --> commit_CommitFunction",
        "commit_Commits1Queue -.-> commit_Commits1DeadLetters",
        "commit_CommitFunction --> database_Cluster",
        "compaction_RunsStateMachine --> compaction_SubmitFunction",
        "compaction_SubmitFunction --> compaction_EmrApplication",
        "migrate_BeginFunction --> migrate_MigrateFunction",
        "migrate_MigrateFunction --> database_Cluster",
        "query_AwakeBalancerLoadBalancer --> query_AwakeService",
        "query_AwakeService --> storage_Data",
    } <= lines


def test_what_is_off_is_not_drawn(synthesized: Callable[[str], Assembly]) -> None:
    assert "compaction" not in draw(synthesized("minimal").templates)
