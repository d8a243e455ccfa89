"""What one setting of a run needs of the libraries and GPUs of every rank.

Belongs here: the record. Does not belong here: which settings need what (see
`megatron_software`), comparing it with what ranks have (see `hpctrain.train.software_agreement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Fields of `hpctrain.records.software.SoftwareFacts` with a library.
LibraryName = Literal["transformer_engine", "apex_wgrad", "deep_ep", "hybrid_ep"]


@dataclass(frozen=True, kw_only=True)
class SoftwareNeed:
    """`setting`, as people write it, needs a library, or GPUs of some compute capability.

    Versions and capabilities are (major, minor). A `version` None means any; a GPU's capability is
    at least `capability` and below `capability_below`; `cuda` is the least CUDA of torch's build.
    """

    setting: str
    library: LibraryName | None = None
    version: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    capability_below: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    # the setting without it
    instead: str
