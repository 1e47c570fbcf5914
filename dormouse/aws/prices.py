"""What AWS charges in a region, from the dated file prices.toml beside this one; no network."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import ACCESS_HOST, DISK_GB

HOURS_MONTH = 730
EMR_OF_FARGATE = 1.3
"""What EMR Serverless costs by the price of Fargate: see prices.toml."""

# How much of a `large` a size is; `metal` is priced by family, which the file does not have.
_SIZES = {"nano": 1 / 16, "medium": 0.5, "large": 1, "xlarge": 2}


@dataclass(frozen=True)
class Prices:
    """USD by the names of prices.toml, in which the unit stands last."""

    date: date
    source: str
    usd: Mapping[str, float]
    """What the region charges for everything that no instance is of."""

    aurora_large_hour: Mapping[str, float]
    """By family of instances, in us-east-1."""

    ec2_xlarge_hour: Mapping[str, float]
    """By family of instances, in us-east-1."""

    def __getitem__(self, name: str) -> float:
        return self.usd[name]

    def aurora_hour(self, instance_class: str) -> float | None:
        """Of `r8g.xlarge`, with or without `db.`; None when the file has no price of it."""
        family, size = _parts(instance_class)
        price = self.aurora_large_hour.get(family)
        return None if price is None or size is None else price * size * self["aurora_instance_factor"]

    def ec2_hour(self, instance_type: str, *, with_emr: bool = True) -> float | None:
        """Of the instance, with EMR on it or without; None when the file has no price of it."""
        family, size = _parts(instance_type)
        price = self.ec2_xlarge_hour.get(family)
        if price is None or size is None:
            return None
        return price * size / 2 * self["ec2_factor"] * (1 + with_emr * self["emr_share_of_ec2"])

    @property
    def access_hour(self) -> float:
        """Of the host for access with its disk, without endpoints."""
        return (self.ec2_hour(ACCESS_HOST, with_emr=False) or 0.0) + (
            DISK_GB * self["ebs_gb_month"] / HOURS_MONTH
        )

    def emr_vcpu_hour(self, architecture: str) -> float:
        """Of EMR Serverless, with the 4 GB that go with a vCPU."""
        vcpu, gb = self._emr(architecture)
        return vcpu + 4 * gb

    def fargate_hour(self, architecture: str, cpu: int, memory_mb: int) -> float:
        """Of a task, without its disk; `cpu` is in units of which a vCPU has 1,024."""
        vcpu, gb = self._emr(architecture)
        return (cpu * vcpu + memory_mb * gb) / 1_024 / EMR_OF_FARGATE

    def _emr(self, architecture: str) -> tuple[float, float]:
        kind = "arm" if architecture == "arm64" else "x86"
        return self[f"emr_{kind}_vcpu_hour"], self[f"emr_{kind}_gb_hour"]


def prices_of(region: str) -> Prices:
    """The prices of a region; raises InvalidInput with the regions that are known."""
    content = _content()
    if region not in content["regions"]:
        raise InvalidInput(
            f"there are no prices of the region {region}: they are known of {', '.join(known_regions())}; "
            "name one of these with --region for an estimate"
        )
    families = {name: content[name] for name in ("aurora_large_hour", "ec2_xlarge_hour")}
    return Prices(**content["about"], usd=content["everywhere"] | content["regions"][region], **families)


def known_regions() -> list[str]:
    return list(_content()["regions"])


def vcpus(instance: str) -> int:
    """The virtual CPUs of an instance of this size: 4 of `r8g.xlarge`."""
    _, size = _parts(instance)
    return max(2, round(2 * (size or 1)))


def _parts(instance: str) -> tuple[str, float | None]:
    family, _, size = instance.removeprefix("db.").partition(".")
    if size in _SIZES:
        return family, _SIZES[size]
    number = size.removesuffix("xlarge")
    return family, 2.0 * int(number) if number.isdigit() else None


@cache
def _content() -> dict[str, Any]:
    text = files("dormouse.aws").joinpath("prices.toml").read_text("utf-8")
    return tomllib.loads(text)
