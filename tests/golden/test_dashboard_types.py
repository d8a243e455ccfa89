"""The packaged dashboards have the types of Grafana's own schema, of two of its releases.

`@grafana/schema` (npm, Apache-2.0) is generated from the schema of the same release of Grafana. The
TypeScript compiler reads each dashboard as a value of its type `Dashboard`, and the options of each
panel, which that type leaves open, as a value of the type of its kind of panel. What this does not
check: anything that Grafana does with them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpctrain.observe.dashboard_data import DASHBOARD_NAMES
from hpctrain.observe.grafana_dashboard import DIRECTORY

pytestmark = pytest.mark.nightly("type definitions of Grafana, which npm fetches")

TYPESCRIPT = "5.9.3"
RELEASES = ("11.6.0", "13.2.3")
_CACHE = Path(__file__).resolve().parents[2] / ".slurm" / "grafana-types"
# Enumerations as the texts and numbers that JSON has.
_PLAIN = """
type Plain<T> = T extends string ? `${T}`
  : T extends number ? (number extends T ? number
    : T | (`${T}` extends `${infer N extends number}` ? N : never))
  : T extends Array<infer U> ? Array<Plain<U>>
  : T extends object ? {[K in keyof T]: Plain<T[K]>} : T;
// Grafana fills in options that are left out.
type Given<T> = T extends Array<infer U> ? Array<Given<U>>
  : T extends object ? {[K in keyof T]?: Given<T[K]>} : T;
"""
# The names of panels' types in the files of the schema.
_PANEL_TYPES = {
    "timeseries": "TimeSeries",
    "stat": "Stat",
    "bargauge": "BarGauge",
    "table": "Table",
    "state-timeline": "StateTimeline",
}
# Not in these types: fields of the Prometheus plugin; fields of older releases and of other kinds
# of variables, which Grafana ignores.
_OF_THE_PLUGIN = ("expr", "titleFormat", "textFormat", "step")
_OF_OTHER_VARIABLES = ("id", "auto", "auto_min", "auto_count")
_OF_OLDER_TABLES = "footer"


@pytest.fixture(scope="module")
def node_packages() -> Path:
    """The directory with the compiler and the types, fetched on first use."""
    names = [f"typescript@{TYPESCRIPT}", *(f"g{one}@npm:@grafana/schema@{one}" for one in RELEASES)]
    marker = _CACHE / "complete"
    if marker.exists() and marker.read_text() == "\n".join(names):
        return _CACHE
    if shutil.which("npm") is None:
        pytest.skip("NOT TRIED with Grafana's types: there is no npm")
    _CACHE.mkdir(parents=True, exist_ok=True)
    (_CACHE / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *names]
    done = subprocess.run(command, cwd=_CACHE, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"NOT TRIED with Grafana's types: npm fetches nothing: {done.stderr[-200:]}")
    marker.write_text("\n".join(names))
    return _CACHE


def without_untyped(document: dict[str, Any]) -> dict[str, Any]:
    document.pop("style", None)
    for marks in document["annotations"]["list"]:
        for key in _OF_THE_PLUGIN:
            marks.pop(key, None)
    for variable in document["templating"]["list"]:
        for key in _OF_OTHER_VARIABLES:
            variable.pop(key, None)
    for panel in document["panels"]:
        if panel["type"] == "table":
            panel["options"].pop(_OF_OLDER_TABLES, None)
    return document


def complaints(packages: Path, place: Path, release: str, documents: dict[str, Any]) -> str:
    """What the compiler says about dashboards as values of a release's type."""
    lines = [f'import type * as grafana from "g{release}";', _PLAIN]
    for kind in _PANEL_TYPES.values():
        file = f"raw/composable/{kind.lower()}/panelcfg/x/{kind}PanelCfg_types.gen"
        lines.append(f'import type * as {kind} from "./node_modules/g{release}/dist/esm/{file}";')
    for name, document in documents.items():
        lines.append(f"export const {name}: Plain<grafana.Dashboard> = {json.dumps(document)};")
        for number, panel in enumerate(document["panels"]):
            if panel["type"] != "row":
                kind = _PANEL_TYPES[panel["type"]]
                options = json.dumps(panel["options"])
                lines.append(
                    f"export const {name}_{number}: Plain<Given<{kind}.Options>> = {options};"
                )
    (place / "dashboards.ts").write_text("\n".join(lines))
    (place / "node_modules").symlink_to(packages / "node_modules")
    options = "--noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext"
    command = ["node", "node_modules/typescript/bin/tsc", *options.split(), "dashboards.ts"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize("release", RELEASES)
def test_dashboards_have_grafanas_types(release: str, node_packages: Path, tmp_path: Path) -> None:
    documents = {
        path.stem: without_untyped(json.loads(path.read_text()))
        for path in DIRECTORY.glob("*.json")
    }
    assert len(documents) == len(DASHBOARD_NAMES)
    assert complaints(node_packages, tmp_path, release, documents) == ""


def test_a_wrong_type_is_found(node_packages: Path, tmp_path: Path) -> None:
    document = without_untyped(json.loads((DIRECTORY / "fleet.json").read_text()))
    document["panels"][1]["gridPos"]["w"] = "wide"
    document["tags"] = "hpctrain"
    document["panels"][1]["options"]["textMode"] = "large"
    document["panels"][2]["options"]["unknown"] = 1
    found = complaints(node_packages, tmp_path, RELEASES[-1], {"fleet": document})
    assert len(re.findall("error TS", found)) == 4, found
