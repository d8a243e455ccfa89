"""`extends` and the parts of partitions: what counts, origins of values, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.loader import find_profile, load_profile, partition_profile
from hpctrain.spec.positions import write_resolved

BASE = find_profile("a100x64")


def written(directory: Path, name: str, text: str) -> Path:
    file = directory / f"{name}.yaml"
    file.write_text(text)
    return file


def problems(file: Path, *search_path: Path) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file, search_path)
    return [str(problem) for problem in caught.value.problems]


def test_values_of_the_extending_profile_count_and_the_rest_is_the_base(tmp_path: Path) -> None:
    file = written(tmp_path, "own", "extends: a100x64\nname: own\nnodes:\n  count: 7\n")
    loaded, base = load_profile(file), load_profile(BASE)
    same = loaded.document.model_copy(update={"nodes": base.document.nodes, "name": "a100x64"})
    assert same == base.document
    assert loaded.document.nodes.count == 7
    assert loaded.document.nodes.cpus == base.document.nodes.cpus
    assert loaded.origin["nodes.count"] == "own.yaml:4"
    assert loaded.origin["nodes.cpus"] == base.origin["nodes.cpus"].replace(base.file, BASE.name)


def test_things_with_names_are_joined_and_null_removes(tmp_path: Path) -> None:
    text = """
extends: a100x64
name: own
prices: null
environment:
  - name: NCCL_DEBUG
    value: INFO
  - {name: NCCL_CROSS_NIC, value: "1", reason: two rails}
"""
    own = load_profile(written(tmp_path, "own", text)).document
    base = load_profile(BASE).document
    names = [variable.name for variable in own.environment]
    assert names == [variable.name for variable in base.environment] + ["NCCL_CROSS_NIC"]
    debug = {variable.name: variable for variable in own.environment}["NCCL_DEBUG"]
    before = {variable.name: variable for variable in base.environment}["NCCL_DEBUG"]
    assert (debug.value, debug.reason) == ("INFO", before.reason)
    assert (own.prices, base.prices is None) == (None, False)


def test_a_thing_of_the_base_is_removed_by_its_name_alone(tmp_path: Path) -> None:
    base = written(
        tmp_path,
        "base",
        """
extends: a100x64
name: base
slurm:
  partitions:
    - {name: debug, max_walltime: 1h}
    - {name: long, max_walltime: 72h}
""",
    )
    assert {"debug", "long"} <= {one.name for one in load_profile(base).document.slurm.partitions}
    own = "extends: ./base.yaml\nname: own\nslurm: {partitions: [%s]}\n"
    removed = load_profile(written(tmp_path, "own", own % "{name: debug, remove: true}")).document
    assert [one.name for one in removed.slurm.partitions] == [
        one.name for one in load_profile(base).document.slurm.partitions if one.name != "debug"
    ]
    for wrong in ("{name: debgu, remove: true}", "{name: debug, remove: true, qos: a}"):
        assert any("remove" in text for text in problems(written(tmp_path, "own", own % wrong)))


def test_a_resolved_profile_needs_no_base(tmp_path: Path) -> None:
    file = written(tmp_path, "own", "extends: a100x64\nname: own\nnodes: {count: 7}\n")
    loaded = load_profile(file)
    again = load_profile(written(tmp_path, "copy", write_resolved(loaded)))
    assert (again.document, again.digest) == (loaded.document, loaded.digest)


def test_bases_are_found_beside_the_file_in_the_search_path_and_packaged(tmp_path: Path) -> None:
    site, team = tmp_path / "site", tmp_path / "team"
    site.mkdir()
    team.mkdir()
    written(site, "base", "extends: a100x64\nname: base\nnodes: {count: 5}\n")
    file = written(team, "own", "extends: base\nname: own\n")
    assert load_profile(file, [team, site]).document.nodes.count == 5
    # a site's own copy may have the name of the packaged one that it extends
    same = written(team, "a100x64", "extends: a100x64\nname: a100x64\nnodes: {count: 6}\n")
    assert load_profile(same, [team, site]).document.nodes.count == 6
    by_path = written(team, "third", "extends: ../site/base.yaml\nname: third\n")
    assert load_profile(by_path).document.nodes.count == 5


def test_problems_have_the_place_of_the_file_that_contains_them(tmp_path: Path) -> None:
    written(tmp_path, "base", "extends: a100x64\nname: base\nnodes: {count: none}\n")
    file = written(tmp_path, "own", "extends: base\nname: own\ngpu: {tipe: h100}\n")
    found = problems(file)
    assert [line.split(": ")[0] for line in found] == [
        f"{file}:3:7",
        f"{tmp_path / 'base.yaml'}:3:16",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: a100x46\nname: own\n", "1:10: `extends`: no cluster profile is called"),
        ("extends: 3\nname: own\n", "1:10: `extends`: expected the name of a profile"),
        ("extends: a100x64\n", "1:10: `name`: a profile that extends `a100x64` needs a name"),
        ("extends: ./none.yaml\nname: own\n", "none.yaml: no such file"),
    ],
)
def test_a_base_that_cannot_be_used_is_one_clear_problem(
    tmp_path: Path, text: str, expected: str
) -> None:
    found = problems(written(tmp_path, "own", text))
    assert len(found) == 1
    assert expected in found[0]


def test_profiles_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "one", "extends: two\nname: one\n")
    file = written(tmp_path, "two", "extends: one\nname: two\n")
    assert problems(file) == [
        f"{tmp_path / 'one.yaml'}:1:10: `extends`: profiles extend each other: "
        "two.yaml -> one.yaml -> two.yaml"
    ]


PARTITIONS = """
extends: a100x64
name: mixed
gpu: {gres: nvidia_a100}
slurm:
  account: research
  partitions:
    - name: h100
      request: false
      account: hopper
      qos: fast
      constraint: ""
      min_nodes: 2
      max_gpus: 64
      nodes: {count: 12, cpus: 96}
      gpu: {type: h100, memory: 81559MiB, peak: {bf16: 989TFLOP/s}}
      environment:
        - {name: NCCL_NVLS_ENABLE, value: "1", reason: NVSwitch of the third generation}
"""


def test_a_partition_has_its_own_hardware_options_and_variables(tmp_path: Path) -> None:
    loaded = load_profile(written(tmp_path, "mixed", PARTITIONS))
    base = loaded.document
    own = partition_profile(loaded, "h100")
    site = own.document
    assert (base.gpu.gres_type, site.gpu.gres_type) == ("nvidia_a100", "h100")
    assert (site.nodes.count, site.nodes.cpus, site.nodes.memory) == (12, 96, base.nodes.memory)
    assert (site.gpu.type, site.gpu.per_node) == ("h100", base.gpu.per_node)
    assert set(site.gpu.peak) == {"bf16"}, "figures of another type are not inherited"
    assert (site.slurm.account, site.slurm.qos, site.slurm.constraint) == ("hopper", "fast", None)
    assert "NCCL_NVLS_ENABLE" in [variable.name for variable in site.environment]
    assert partition_profile(loaded, None) is loaded
    assert partition_profile(own, "h100") is own
    assert own.origin["gpu.type"] == "mixed.yaml:16"
    assert own.origin["slurm.account"] == "mixed.yaml:10"
    assert own.origin["gpu.per_node"] == str(loaded.origin["gpu.per_node"])
    assert own.digest != loaded.digest


def test_a_figure_of_another_gpu_is_missing_and_not_inherited(tmp_path: Path) -> None:
    text = PARTITIONS.replace("memory: 81559MiB, ", "")
    found = problems(written(tmp_path, "mixed", text))
    assert [line for line in found if "slurm.partitions" in line and "memory" in line]


def test_the_parts_of_a_partition_have_to_fit_together(tmp_path: Path) -> None:
    islands = """
      network:
        islands:
          - {nodes: 4, uplink: 100Gb/s}
          - {nodes: 4, uplink: 100Gb/s}
"""
    found = problems(written(tmp_path, "mixed", PARTITIONS.rstrip() + islands))
    assert len(found) == 1
    assert "partition `h100`" in found[0]
    assert "islands add up to 4 + 4 = 8 nodes, not 12" in found[0]


def test_all_memory_of_earlier_profiles_is_still_read(tmp_path: Path) -> None:
    for former, now in (("true", "auto"), ("false", "none")):
        text = f"extends: a100x64\nname: own\nslurm: {{all_memory: {former}}}\n"
        loaded = load_profile(written(tmp_path, "own", text))
        assert loaded.document.slurm.memory == now
        assert loaded.origin["slurm.memory"] == "own.yaml:3"
    both = written(
        tmp_path, "both", "extends: a100x64\nname: b\nslurm: {memory: none, all_memory: true}\n"
    )
    assert any("`slurm.memory` now" in problem for problem in problems(both))
