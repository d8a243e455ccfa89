"""A person's request for a checkpoint: the file `control/save`, which rank 0 looks for.

Belongs here: seeing it and taking it away. Does not belong here: saving (see `saver`), who writes
the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.train.stop import file_exists


@dataclass
class SaveRequest:
    """Does nothing on other ranks than 0 (`looks` False)."""

    path: Path
    looks: bool

    @property
    def made(self) -> bool:
        return self.looks and file_exists(self.path)

    def done(self) -> bool:
        """A save has begun: whatever was asked for until now is in it. True if it was asked for.

        A file that cannot be removed would ask for ever: it is not looked at again.
        """
        if not self.made:
            return False
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError:
            self.looks = False
        return True
