"""The signatures and XIDs that come with hpctrain, and those that a site adds.

Read when a run is submitted; the supervisor reads the JSON that is made from them. Belongs here:
finding and reading the YAML files. Does not belong here: their documents (`signatures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hpctrain.judge.signatures import SignatureFile, Signatures, XidFile
from hpctrain.spec.files import load_packaged
from hpctrain.spec.loader import SIGNATURES_FILE, XIDS_FILE, load_document

PACKAGED = Path(__file__).resolve().parent


def load_signatures(search_path: Sequence[Path] = ()) -> Signatures:
    """What comes with hpctrain, and the `signatures.yaml` and `xids.yaml` beside profiles.

    Earlier directories go before later ones, as with profiles. The packaged files are read once
    for each process. Raises InvalidInputError with all problems of a site's file.
    """
    known = _packaged()
    for directory in reversed(search_path):
        own, xids = directory / SIGNATURES_FILE, directory / XIDS_FILE
        known = known.extended(
            load_document(SignatureFile, own).document if own.is_file() else None,
            load_document(XidFile, xids).document if xids.is_file() else None,
        )
    return known


@cache
def _packaged() -> Signatures:
    lines = load_packaged(SignatureFile, PACKAGED / SIGNATURES_FILE)
    codes = load_packaged(XidFile, PACKAGED / XIDS_FILE)
    return Signatures(signatures=lines.signatures, xids=codes.xids, sxids=codes.sxids)
