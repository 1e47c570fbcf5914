"""The settings of the way to the database from outside of its VPC."""

from __future__ import annotations

from typing import Literal

from dormouse.settings.section import Section, setting

ACCESS_HOST = "t4g.nano"
DISK_GB = 8
"""What its image has."""

ACCESS_TAG = "dormouse:access"
"""Of the host, with the instance's id: who may reach it has a right by this."""


class AccessSettings(Section):
    """A way to the database from outside of the VPC: a host for Session Manager's port forwarding."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """Whether the VPC gets the two interface endpoints that Session Manager needs, or has a way to it.
    `create` in an own VPC. An existing one needs a word: all in it would use them."""
