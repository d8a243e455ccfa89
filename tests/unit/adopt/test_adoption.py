"""What becomes of each line of a batch script: fields, sentences, nothing lost, nothing run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_scripts import ADAPTERS, ARGUMENTS, SHAPES, adopted, combined_scripts

from hpctrain.adopt.draft import Adoption
from hpctrain.spec import loader
from hpctrain.spec.loader import load_profile, load_trainer_spec
from hpctrain.spec.trainer import TrainerRunSpec

COMBINED = combined_scripts()
SECRETS = (
    ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567"),
    ("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx"),
    ("MY_PASSWORD", "correct-horse"),
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for name, adapter in ADAPTERS.items():
        text = adapter.model_dump_json(by_alias=True, exclude_defaults=True)
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.fixture(autouse=True)
def own_adapters(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters of the tests, in the place of the packaged ones."""
    monkeypatch.setattr(loader, "PACKAGED_ADAPTERS", adapters)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a script is never run")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        yield


def loaded(done: Adoption, directory: Path) -> TrainerRunSpec:
    """The spec, after its author has answered the questions."""
    text = done.spec.replace("step: ASK", "step: 7").replace("gpus: ASK", "gpus: 8")
    text = text.replace("path: ASK", 'path: "step-{step}"').replace(
        "directory: ASK", "directory: ."
    )
    file = directory / "spec.yaml"
    file.write_text(text.replace("ASK", "mine"))
    return load_trainer_spec(file).document


def not_lost(text: str, done: Adoption) -> None:
    """Every line that means something occurs exactly once."""
    wanted = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
        and (not line.lstrip().startswith("#") or line.startswith(("#SBATCH", "#!")))
    }
    found = [number for one in done.lines for number in range(one.line, one.last_line + 1)]
    assert len(found) == len(set(found)), "a line occurs twice"
    assert wanted <= set(found), f"lost: {sorted(wanted - set(found))}"
    assert [one.line for one in done.lines] == sorted(one.line for one in done.lines)
    for one in done.lines:
        assert one.parts
        assert all(part.reason for part in one.parts if part.field != "environment.variables.X")


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_shapes_lose_no_line_and_give_a_spec(name: str, tmp_path: Path) -> None:
    shape = next(one for one in SHAPES if one.name == name)
    done = adopted(shape.text, shape.profile)
    not_lost(shape.text, done)
    spec = loaded(done, tmp_path)
    assert spec.resources.gpus
    if done.overlay is not None:
        file = tmp_path / "site.yaml"
        file.write_text(done.overlay.replace("$WORK", "/w").replace("${WORK}", "/w"))
        load_profile(file)


def test_all_combinations_give_the_same_training(tmp_path: Path) -> None:
    for number, (name, (text, launch)) in enumerate(COMBINED.items()):
        done = adopted(text, None if number % 4 else "a100x64")
        not_lost(text, done)
        spec = loaded(done, tmp_path)
        assert spec.trainer.launch == launch, name
        assert spec.trainer.framework == "hf", name
        assert spec.resources.gpus == 8, name
        assert spec.trainer.done.step == 500, name
        words = spec.trainer.command or ()
        wanted = ARGUMENTS.replace("out/x/last", "{resume}").replace("out/x", "{output}").split()
        assert list(words[-len(wanted) :]) == wanted, name
        assert words[-len(wanted) - 1] == "train.py", name
        if done.overlay is not None:
            file = tmp_path / "site.yaml"
            file.write_text(done.overlay)
            overlay = load_profile(file).document.software
            assert overlay.activate is not None
            assert (overlay.container is not None) == ("/i.s" in text), name


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_a_script_that_is_cut_anywhere_loses_no_line(name: str) -> None:
    text = next(one.text for one in SHAPES if one.name == name)
    for end in range(1, len(text), 37):
        not_lost(text[:end], adopted(text[:end]))


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("#SBATCH --job-name='my run/1'", "name", "my-run-1"),
        ("#SBATCH -t 90", "resources.walltime", "01:30:00"),
        ("#SBATCH --time=90:30", "resources.walltime", "01:30:30"),
        ("#SBATCH --time 2-12", "resources.walltime", "2-12:00:00"),
        ("#SBATCH -t2-12:30", "resources.walltime", "2-12:30:00"),
        ("#SBATCH --mem=64000", "resources.memory_per_node", "62.5GiB"),
        ("#SBATCH --mem 64G", "resources.memory_per_node", "64GiB"),
        ("#SBATCH --mem-per-gpu=16G", "resources.memory_per_node", "64GiB"),
        ("#SBATCH --mem-per-cpu=2G -c 8", "resources.memory_per_node", "16GiB"),
        ("#SBATCH -c 32", "resources.cpus_per_gpu", "8"),
        ("#SBATCH --reservation=maint", "resources.reservation", "maint"),
        ("#SBATCH -x n[1-3],n7", "resources.exclude", "n[1-3],n7"),
        ("#SBATCH -p debug", "resources.partition", "debug"),
        ("#SBATCH --chdir=/proj", "trainer.directory", "/proj"),
        ("#SBATCH --signal=USR2@60", "trainer.signal.save", "USR2"),
        ("cd sub/dir", "trainer.directory", "/project/sub/dir"),
        ("export A=1 B='x y'", "environment.variables.B", "x y"),
        ('export A="$SCRATCH/a"', "environment.variables.A", "$SCRATCH/a"),
        ("export A=${B:-c}", "environment.variables.A", "c"),
        ("export A='$x'", "environment.variables.A", "$$x"),
    ],
)
def test_a_line_becomes_a_field_of_the_spec(line: str, field: str, value: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --gres=gpu:4\n{line}\nsrun python train.py\n"
    part = next(one for one in adopted(text).lines[2].parts if one.field == field)
    assert part.outcome == "spec"
    if field not in ("resources.cpus_per_gpu", "trainer.signal.save"):
        assert part.reason == value
    assert value in adopted(text).spec


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("#SBATCH -A proj@gpu", "slurm.account", "proj@gpu"),
        ("#SBATCH -q long", "slurm.qos", "long"),
        ('#SBATCH -C "a100&nvme"', "slurm.constraint", "a100&nvme"),
        ("#SBATCH --exclusive=user", "slurm.exclusive", "user"),
        ("#SBATCH --gpus-per-node=a100:4", "gpu.gres", "a100"),
        ("#SBATCH --hint=nomultithread", "slurm.options.sbatch.hint", "nomultithread"),
        ("#SBATCH --export=NONE", "slurm.export", "none"),
        ("module purge", "software.modules.purge", "true"),
        ("module --force purge", "software.modules.purge", "force"),
        ("module use /sw/modules", "software.modules.use", "/sw/modules"),
        ("ml gcc/12 cuda", "software.modules.load", "gcc/12 cuda"),
        ("source env/bin/activate", "software.activate.venv", "/project/env"),
        (". ~/env/bin/activate", "software.activate.venv", "${HOME}/env"),
        ("source /opt/conda/bin/activate ml", "software.activate.conda", "ml"),
        ("source activate ml", "software.activate.conda", "ml"),
        ("micromamba activate ml", "software.activate.micromamba", "ml"),
        ("source /etc/profile.d/lmod.sh", "software.modules.init", "/etc/profile.d/lmod.sh"),
        ("source setup.sh", "software.setup", "/project/setup.sh"),
        ("ulimit -s unlimited", "software.ulimits.stack", "unlimited"),
        ("unset ROCR_VISIBLE_DEVICES", "software.unset", "ROCR_VISIBLE_DEVICES"),
        ("export NCCL_DEBUG=INFO", "environment", "INFO"),
        ("export LD_LIBRARY_PATH=/a/lib:$LD_LIBRARY_PATH", "environment", "/a/lib"),
    ],
)
def test_a_line_becomes_a_field_of_the_profile(line: str, field: str, value: str) -> None:
    text = f"#!/bin/bash\n{line}\nsrun python train.py\n"
    done = adopted(text)
    part = next(one for one in done.lines[1].parts if one.field == field)
    assert part.outcome == "profile"
    needs = {one.field: one.value for one in done.profile_needs}
    assert value in [
        needs.get(field),
        *(v for k, v in needs.items() if k.startswith("environment.")),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#SBATCH --requeue", "hpctrain requeues by the cause"),
        ("#SBATCH --array=0-9%1", "a chain by an array"),
        ("#SBATCH -d singleton", "in the same job"),
        ("#SBATCH --signal=B:USR1@300", "the signal was for the script"),
        ("#SBATCH -o log-%j.txt", "its logs in the directory of the run"),
        (
            "trap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1 TERM",
            "the supervisor catches signals",
        ),
        ("scontrol requeue $SLURM_JOB_ID", "hpctrain requeues by the cause"),
        ("sbatch job.sbatch", "hpctrain goes on by itself"),
        ("export MASTER_ADDR=$(scontrol show hostnames $SLURM_NODELIST | head -n1)", "each rank"),
        ("export NODES=$(scontrol show hostnames $SLURM_NODELIST)", "the first node"),
        ("RANK=$SLURM_PROCID", "each rank"),
        ("nvidia-smi", "only prints"),
        ("module list", "only prints"),
        ("mkdir -p logs outputs/run", "makes the directories"),
        ('eval "$(conda shell.bash hook)"', "makes the tool"),
        ("set -euxo pipefail", "the shell around the training"),
        ("wait", "the shell around the training"),
    ],
)
def test_what_hpctrain_does_itself_is_said(line: str, words: str) -> None:
    done = adopted(f"#!/bin/bash\n{line}\nsrun python train.py\n")
    assert [part.outcome for part in done.lines[1].parts] == ["needless"]
    assert words in done.lines[1].parts[0].reason
    assert not done.dropped


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#SBATCH --array=1-9", "a run of its own"),
        ("#SBATCH --dependency=afterok:17", "--after RUN"),
        ("#SBATCH --nodes=$N", "sbatch expands no variables"),
        ("#SBATCH --our-plugin=1", "one of a plugin"),
        ("#SBATCH -t soon", "no time limit"),
        ("#SBATCH stray", "no such words"),
        ("pip install -e .", "do it before you submit"),
        ("cat > ds.json <<EOF\n{}\nEOF", "write it once"),
        ("export D=$(date +%F)", "write a value"),
        ("for i in 1 2; do\n  echo $i\ndone", "a loop"),
        ("if [ -f x ]; then rm x; fi", "a decision of the shell"),
        ("sbatch other.sh", "--after RUN"),
        ("source .env", "environment.inherit"),
        ("srun python -u train.py --other", "make a second spec"),
        ("umask 007", "do it before you submit"),
        ("module swap a b", "load what is to be there"),
    ],
)
def test_what_is_lost_is_said(line: str, words: str) -> None:
    done = adopted(f"#!/bin/bash\n{line}\nsrun python train.py\n")
    assert [part.reason for _, part in done.dropped if words in part.reason], done.dropped


def test_a_directive_behind_the_first_command_is_none() -> None:
    done = adopted("#!/bin/bash\n#SBATCH -N 2\necho\n#SBATCH --gres=gpu:4\npython train.py\n")
    (line, part), *_ = done.dropped
    assert (line.line, part.reason) == (4, "sbatch reads no such line behind the first command")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("torchrun --nproc_per_node 4 a.py x", "python -u a.py x"),
        ("./pt/bin/torchrun --standalone -m pkg.train x", "./pt/bin/python -u -m pkg.train x"),
        ("uv run torchrun --nproc-per-node=4 a.py", "uv run python -u a.py"),
        ("torchrun --no-python ./prog x", "./prog x"),
        ("python3 -u -m torch.distributed.launch --use_env a.py", "python3 -u a.py"),
        ("accelerate launch --multi_gpu -m pkg.train x", "python -m pkg.train x"),
        ("mpirun -np 8 --allow-run-as-root -x PATH python a.py x", "python a.py x"),
        ("bash -lc 'cd /x && export Q=1 && exec python a.py --q $Q'", "python a.py --q 1"),
        ("env A=1 numactl -l python a.py", "numactl -l python a.py"),
        ("bash run.sh x", "bash run.sh x"),
    ],
)
def test_the_launcher_is_taken_from_the_command(line: str, command: str, tmp_path: Path) -> None:
    spec = loaded(adopted(f"#!/bin/bash\n#SBATCH --gres=gpu:4\nsrun {line}\n"), tmp_path)
    assert " ".join(spec.trainer.command or ()) == command


@pytest.mark.parametrize(
    ("size", "line", "launch"),
    [
        ("--gres=gpu:4 --ntasks-per-node=4", "srun python a.py", "srun"),
        ("--gres=gpu:4 --ntasks-per-node=1", "srun python a.py", "self"),
        ("--gres=gpu:4", "python a.py", "self"),
        ("--gres=gpu:1", "python a.py", "srun"),
        ("--gres=gpu:1 -n 1", "srun python a.py", "srun"),
        ("-N 2 --gpus-per-task=1 --ntasks-per-node=4", "srun python a.py", "srun"),
    ],
)
def test_without_a_launcher_tasks_and_gpus_say_how_it_starts(
    size: str, line: str, launch: str, tmp_path: Path
) -> None:
    done = adopted(f"#!/bin/bash\n#SBATCH {size}\n{line}\n")
    assert loaded(done, tmp_path).trainer.launch == launch


def test_what_eval_is_given_is_read(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -G 1\nCMD='srun python a.py'\neval $CMD\n"
    assert loaded(adopted(text), tmp_path).trainer.command == ("python", "a.py")


def test_a_resume_without_an_adapter_is_a_question() -> None:
    done = adopted("#!/bin/bash\nsrun python a.py --resume last.pt --total_steps 10\n")
    assert '"{resume}"' in done.spec
    assert [one.partition(":")[0] for one in done.questions] == [
        "trainer.checkpoint.path",
        "resources.gpus",
    ]


def test_a_flag_to_resume_means_that_the_trainer_looks_itself() -> None:
    done = adopted("#!/bin/bash\nsrun python a.py --resume\n")
    assert "found: true" in done.spec


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_no_secret_is_in_the_answer(name: str, value: str) -> None:
    option = f"--{name.lower().replace('_', '-')}"
    lines = (
        f"export {name}={value}",
        f"{name}='{value}'",
        f'export {name}="${{{name}:-{value}}}"',
        f"echo {name}={value} > .netrc",
        f"cat > f <<EOF\n{name}={value}\nEOF",
        f"if true; then\n  export {name}={value}\nfi",
        f"hf login {option} {value}",
        f"{name}={value} srun python train.py {option}={value} {option} {value}",
        f"srun --export=ALL,{name}={value} apptainer exec --env {name}={value} i.sif python a.py",
        f"K={value}\nsrun python train.py {option} $K",
    )
    for line in lines:
        done = adopted(f"#!/bin/bash\n{line}\nsrun python train.py\n", "a100x64")
        written = done.model_dump_json()
        assert value not in written, line


def test_an_exported_secret_is_passed_on_by_its_name() -> None:
    done = adopted("#!/bin/bash\nexport HF_TOKEN=hf_abcdefghijklmnopqrstuvwx\npython train.py\n")
    assert "inherit: [HF_TOKEN]" in done.spec


def test_variables_of_srun_are_those_of_the_spec(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -G 1\nsrun --export=ALL,MODE=fast,EDITOR python a.py\n"
    environment = loaded(adopted(text), tmp_path).environment
    assert environment.variables == {"MODE": "fast"}
    assert environment.inherit == ("EDITOR",)


def test_a_list_that_the_profile_has_is_not_written_again() -> None:
    text = "#!/bin/bash\nmodule load {}\nsrun python train.py\n"
    done = adopted(text.format("arch/h100"), "jean-zay-h100")
    assert done.overlay is None
    assert [part.outcome for part in done.lines[1].parts] == ["needless"]
    several = adopted(
        "#!/bin/bash\nmodule load a\nmodule load b\npython train.py\n", "jean-zay-h100"
    )
    assert several.overlay is not None
    assert re.search(r"load: \[a, b\]", several.overlay)


def test_an_option_goes_to_the_partition_that_has_one_of_its_own() -> None:
    done = adopted("#!/bin/bash\n#SBATCH -p dev --qos=other\npython train.py\n", "jean-zay-h100")
    assert done.overlay is not None
    assert re.search(r"- name: dev .*\n +qos: other", done.overlay)
