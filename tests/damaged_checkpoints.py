"""Changing the files of a checkpoint: behind the manifest's back, or as if it had been saved so."""

from __future__ import annotations

from pathlib import Path

from hpctrain.records.manifest import MANIFEST_NAME, digest_file, read_manifest


def flip_a_byte(path: Path, place: int | None = None) -> None:
    """Silent corruption: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 0xFF
    path.write_bytes(data)


def vouch(directory: Path) -> None:
    """Make the manifest say that the files were written as they are now."""
    manifest = read_manifest(directory)
    assert manifest is not None
    files = tuple(digest_file(directory, file.name) for file in manifest.files)
    text = manifest.model_copy(update={"files": files}).sealed().model_dump_json()
    (directory / MANIFEST_NAME).write_text(text)
