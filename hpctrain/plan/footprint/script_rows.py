"""What keeping a copy of each job script that is submitted does to files.

Belongs here: that row. Does not belong here: the other places of the run directory (`file_rows`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.quantities import FileRow, Formula

SCRIPT_ROWS = (
    FileRow(
        "kept scripts",  # the directory and the script; a script that was edited is one more
        "run",
        "submit",
        "hpctrain.store.kept_scripts:keep_script",
        inodes=Formula(2),
        open=Formula(2),
        stat=Formula(1),
        rename=Formula(1),
        mkdir=Formula(1),
    ),
)
