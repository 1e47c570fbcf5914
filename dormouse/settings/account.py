"""The settings of what an organization demands of roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dormouse.settings.section import PolicyArn, Section, pattern, setting


class IamSettings(Section):
    """All roles of the instance, and policies for people."""

    permissions_boundary: PolicyArn | None = setting(None)
    """A policy that bounds what every role may do."""

    role_path: str = setting("/", pattern=pattern("role_path"))
    """The path of all roles. With another, or with another role_prefix, a deploy makes other roles."""

    role_prefix: str | None = setting(None, pattern=pattern("role_prefix"))
    """What the names of all roles begin with; left out, CloudFormation names them."""

    policies: tuple[Literal["operator", "reader"], ...] = setting((), strict=False)
    """Managed policies to make for people: an `operator` pauses, resumes and handles dead letters; a `reader`
    reads tables."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.policies)) < len(self.policies):
            yield "policies", "each is named once"
