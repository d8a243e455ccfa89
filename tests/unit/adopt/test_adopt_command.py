"""The command `adopt`: files, exit codes, what is said, and what is left to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import hpctrain
from job_scripts import BY_NAME

from hpctrain.spec.loader import load_named_profile, load_trainer_spec

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=mine --gres=gpu:2 -A proj
module load cuda
srun torchrun --nproc_per_node=2 train.py --out {output} --max_steps 40
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "job.sbatch") -> str:
    Path(name).write_text(text)
    return name


def test_spec_and_overlay_are_written_and_valid(here: Path) -> None:
    done = hpctrain("adopt", write(SCRIPT), "-p", "a100x64")
    assert done.exit_code == 0, done.stderr
    assert load_trainer_spec(here / "mine.yaml").document.trainer.done.step == 40
    overlay = load_named_profile("mine.profile.yaml").document
    assert overlay.slurm.account == "proj"
    assert overlay.software.modules is not None
    assert overlay.software.modules.load == ("cuda",)
    assert overlay.nodes == load_named_profile("a100x64").document.nodes
    assert "Next  hpctrain validate -p mine.profile.yaml mine.yaml" in done.stderr
    assert "Before it can run" not in done.stderr
    assert hpctrain("validate", "mine.yaml", "mine.profile.yaml").exit_code == 0
    again = hpctrain("adopt", "job.sbatch", "-p", "a100x64")
    assert (again.exit_code, again.stdout) == (0, done.stdout)


def test_without_a_profile_the_needs_are_listed(here: Path) -> None:
    done = hpctrain("adopt", write(SCRIPT))
    assert "  slurm.account: proj (line 2)" in done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["job.sbatch", "mine.yaml"]


def test_questions_are_told_with_their_place_and_refused(here: Path) -> None:
    done = hpctrain("adopt", write("#!/bin/bash\npython train.py --run x-$(date +%F)\n"))
    assert done.exit_code == 0
    for field in ("trainer.command[3]", "trainer.done.step", "resources.gpus"):
        assert f"`{field}`: a question is open here" in done.stderr
    refused = hpctrain("validate", "job.yaml")
    assert refused.exit_code == 3
    assert "job.yaml:" in refused.stderr
    assert refused.stderr.count("a question is open here") == 3


def test_strict_fails_where_something_is_dropped_and_writes_nothing(here: Path) -> None:
    name = write(SCRIPT + "pip install x\n")
    done = hpctrain("adopt", name, "--strict")
    assert done.exit_code == 3
    assert "job.sbatch:5: dropped: pip install x" in done.stderr
    assert [path.name for path in here.iterdir()] == ["job.sbatch"]
    assert hpctrain("adopt", name).exit_code == 0
    assert hpctrain("adopt", write(SCRIPT, "whole.sbatch"), "--strict", "-o", "x").exit_code == 0


def test_a_file_with_other_text_is_left_as_it_is(here: Path) -> None:
    (here / "mine.yaml").write_text("mine\n")
    done = hpctrain("adopt", write(SCRIPT))
    assert (done.exit_code, (here / "mine.yaml").read_text()) == (2, "mine\n")
    assert "mine.yaml exists, and is left as it is" in done.stderr


def test_a_spec_elsewhere_has_the_directory_of_the_script(here: Path) -> None:
    assert hpctrain("adopt", write(SCRIPT), "-o", "runs/new").exit_code == 0
    spec = load_trainer_spec(here / "runs/new/mine.yaml").document
    assert spec.trainer.directory == str(here)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_json_has_every_line_and_the_promised_schema(name: str) -> None:
    text = BY_NAME[name].text
    done = hpctrain("adopt", write(text), "--json")
    assert done.exit_code == 0, done.stderr
    lines = json.loads(done.stdout)["adoption"]["lines"]
    inside = "\n".join(one["text"] for one in lines).splitlines()
    missing = [
        line
        for line in text.splitlines()
        if line.strip() and line not in inside and (line[:2] == "#S" or line.lstrip()[0] != "#")
    ]
    assert all("API_KEY" in line for line in missing)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nothing.sbatch",), 3, "nothing.sbatch"),
        ((".",), 3, "directory"),
        (("job.sbatch", "-p", "no-such"), 3, "no cluster profile is called"),
        (("job.sbatch", "-o", "job.sbatch"), 2, "job.sbatch"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], code: int, words: str) -> None:
    write(SCRIPT)
    done = hpctrain("adopt", *arguments)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_binary_file_is_no_script() -> None:
    Path("x").write_bytes(b"#!/bin/bash\n\0\n")
    done = hpctrain("adopt", "x")
    assert done.exit_code == 3
    assert "x:" in done.stderr


def test_nothing_of_a_script_is_run(here: Path) -> None:
    mark = here / "mark"
    text = f"""\
#!/bin/bash
#SBATCH --job-name=$(touch {mark})
touch {mark}
X=$(touch {mark})
Y=`touch {mark}`
Z=$(( $(touch {mark}; echo 1) + 1 ))
eval "touch {mark}"
source <(touch {mark})
trap "touch {mark}" EXIT
f() {{ touch {mark}; }}
f
cat <<EOF
$(touch {mark})
EOF
srun bash -c "touch {mark}; python train.py $(touch {mark})"
"""
    assert hpctrain("adopt", write(text)).exit_code == 0
    assert not mark.exists()
