"""Regions whose databases cannot be verified. They are refused by name until their certificates are added."""

from __future__ import annotations

import shutil
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dormouse.errors import InvalidInput
from dormouse.settings import section
from dormouse.settings.section import no_certificates
from tests.support.settings import parse

LATER = [
    "ap-southeast-5", "ap-southeast-7", "ca-west-1", "il-central-1", "mx-central-1",
    "us-gov-east-1", "us-gov-west-1", "cn-north-1", "cn-northwest-1",
]  # fmt: skip
OLDER = [
    "eu-central-1",
    "eu-west-1",
    "us-east-1",
    "us-west-2",
    "ap-southeast-4",
    "me-central-1",
    "af-south-1",
]


@pytest.mark.parametrize("region", LATER)
def test_a_region_without_certificates_is_refused_by_name(region: str) -> None:
    line = no_certificates(region)
    assert line is not None
    assert line.startswith(f"the certificates of Amazon RDS in {region} are not in rds-ca-bundle.pem: append")
    assert "\n" not in line


@pytest.mark.parametrize("region", OLDER)
def test_other_regions_are_accepted(region: str) -> None:
    assert no_certificates(region) is None


def test_every_region_is_known_or_refused() -> None:
    regions = [
        region
        for partition in ("aws", "aws-cn", "aws-us-gov")
        for region in boto3.Session().get_available_regions("rds", partition)
    ]
    assert sum(no_certificates(region) is None for region in regions) == 27


@pytest.mark.parametrize(
    "text, start",
    [
        ('account = "123456789012"\nregion = "il-central-1"', 'region = "il-central-1"'),
        (
            'network.availability_zones = ["il-central-1a", "il-central-1b"]',
            'network.availability_zones = ["il-central-1a", "il-central-1b"]',
        ),
    ],
)
def test_the_settings_refuse_a_region_without_certificates(text: str, start: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(tomllib.loads(f'id = "dev"\n{text}'), "f")
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"f: {start}: the certificates of Amazon RDS in il-central-1 are not in")


def test_a_region_is_accepted_once_its_certificates_are_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "rds-ca-bundle.pem"
    shutil.copy(section.CA_BUNDLE, bundle)
    monkeypatch.setattr(section, "CA_BUNDLE", bundle)
    with bundle.open("ab") as file:
        file.write(authority("Amazon RDS il-central-1 Root CA ECC384 G1"))
    assert no_certificates("il-central-1") is None
    assert no_certificates("eu-west-1") is None
    assert no_certificates("ca-west-1") is not None


def authority(name: str) -> bytes:
    """Returns the certificate of a new authority, as PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
