"""What the builders of datasets hand over: documents, and where they came from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """One row to be; the name is unique and stable, it decides on which side of the split."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where documents came from: package, version, licence, and the digest of what was read."""

    package: str
    version: str
    licence: str
    sha256: str
