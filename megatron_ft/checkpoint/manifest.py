"""The manifest of a checkpoint: written last, so that what has one is complete."""

from __future__ import annotations

import hashlib
import re
import uuid
from pathlib import Path

import msgspec

from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import CheckpointDamagedError
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId

NAME = "manifest.json"
SHARD_SUFFIX = ".safetensors"
FORMAT_VERSION = 1

_FOLDER = re.compile(r"iter_(\d{7,})-(\d+)\.(\d+)-([0-9a-f]{8})")


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard's file: name in the folder, length, and what vouches for every byte of it.

    ``header_digest`` is of the header (safetensors.header_digest), ``digest_root`` the sealed
    record's for all that follows, both as hex.  ``seat`` is where the shard belongs in the
    job; without one (nobody knew it who drained) no job can start from the file.
    """

    file: str
    bytes: int
    header_digest: str
    digest_root: str
    seat: ShardPlacement | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint.  ``snapshot`` is (incarnation, sequence), ``shards`` go by shard id.

    ``level`` is how the snapshot was protected in memory when it was drained; ``created``
    is UTC in ISO 8601; ``digest`` is of all the other fields.
    """

    format_version: int
    job: uuid.UUID
    snapshot: SnapshotId
    iteration: int
    level: str
    lineage: tuple[Ancestor, ...]
    created: str
    shards: dict[str, ShardFile]
    digest: str = ""

    def to_json(self) -> bytes:
        """The file's content, with its digest."""
        signed = msgspec.structs.replace(self, digest=self._digest())
        return msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"

    def _digest(self) -> str:
        """BLAKE2b-16 of the compact JSON with an empty digest."""
        raw = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> Manifest:
        """The manifest in a file's content; CheckpointDamagedError if it is no whole one."""
        version = _version(raw)
        if version not in (None, FORMAT_VERSION):
            raise CheckpointDamagedError(
                f"{where} has format version {version}, this release reads {FORMAT_VERSION}"
            )
        try:
            manifest = msgspec.json.decode(raw, type=cls)
        except UNREADABLE as error:
            raise CheckpointDamagedError(f"{where} is damaged: {error}") from error
        if manifest.digest != manifest._digest():
            raise CheckpointDamagedError(
                f"{where} does not match its own digest: it was changed after it was written"
            )
        return manifest


def _version(raw: bytes) -> object:
    try:
        found = msgspec.json.decode(raw)
    except UNREADABLE:
        return None
    return found.get("format_version") if isinstance(found, dict) else None


def is_complete(folder: Path) -> bool:
    """Whether a folder is a checkpoint, damaged or not: the manifest comes last and goes first."""
    return (folder / NAME).exists()


def folder_name(job: uuid.UUID, iteration: int, snapshot: SnapshotId) -> str:
    """``iter_0000020-1.7-00c0ffee``: iteration, snapshot id, the start of the job's uuid."""
    return f"iter_{iteration:07d}-{snapshot}-{job.hex[:8]}"


def is_folder_of(name: str, job: uuid.UUID) -> bool:
    """Whether a folder's name is one that folder_name makes for this job."""
    match = _FOLDER.fullmatch(name)
    return match is not None and match[4] == job.hex[:8]


def looks_like_checkpoint(name: str) -> bool:
    """Whether a folder's name is one that folder_name makes for some job."""
    return _FOLDER.fullmatch(name) is not None
