"""The GPU catalogue: figures that fit each other, names that are found, refusals that help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.catalogue import (
    MEMORY_TOLERANCE,
    Gpu,
    GpuCatalogue,
    cluster_gpu,
    find_gpu,
    match_gpu,
)
from hpctrain.spec.loader import PACKAGED_PROFILES, load_catalogue, load_profile, profile_names

CATALOGUE = load_catalogue()
GIB = 2**30
PROFILE = (PACKAGED_PROFILES / "a100x64.yaml").read_text()
OWN = """gpus:
  - name: X1
    aliases: [x1-16gb]
    generation: other
    memory: 16GiB
    peak: {bf16: 100TFLOP/s}
    memory_bandwidth: 1TB/s
    nvlink_bandwidth: 100GB/s
    nvlink_domain: 8
    network_bandwidth: 100Gb/s
    source: our own measurement
"""

# As in the `gpu` column of tables of measurements, from nvidia-smi -L, and as GRES of NVML.
SPELLINGS = {
    "A100-40GB SXM": "A100-40GB SXM",
    "A100-80GB SXM": "A100-80GB SXM",
    "B200-SXM": "B200-SXM",
    "B300-SXM": "B300-SXM",
    "GB200": "GB200",
    "GB300": "GB300",
    "H100-80GB SXM": "H100-80GB SXM",
    "NVIDIA A100-SXM4-80GB": "A100-80GB SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB PCIe",
    "NVIDIA B300 SXM6 AC": "B300-SXM",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA H100 80GB HBM3": "H100-80GB SXM",
    "NVIDIA H100 NVL": "H100-94GB NVL",
    "Tesla V100-SXM2-32GB": "V100-32GB SXM",
    "AMD Instinct MI300X": "MI300X",
    "nvidia_a100-sxm4-40gb": "A100-40GB SXM",
    "nvidia_a800-sxm4-80gb": "A800-80GB SXM",
    "nvidia_l40s": "L40S",
}


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_spellings_of_tables_drivers_and_slurm(spelling: str, name: str) -> None:
    assert find_gpu(CATALOGUE, spelling).name == name


@pytest.mark.parametrize("gpu", CATALOGUE.gpus, ids=lambda gpu: gpu.name)
def test_every_spelling_of_an_entry_leads_to_it(gpu: Gpu) -> None:
    for spelling in (gpu.name, *gpu.aliases):
        found = find_gpu(CATALOGUE, spelling, gpu.memory)
        # PCIe and SXM cards of one memory share the short name: the catalogue says which one
        assert found is gpu, f"{spelling} with {gpu.memory} leads to {found.name}"
    assert match_gpu(CATALOGUE, gpu.name) is gpu


@pytest.mark.parametrize("gpu", CATALOGUE.gpus, ids=lambda gpu: gpu.name)
def test_figures_fit_each_other(gpu: Gpu) -> None:
    peak = gpu.peak
    assert peak["fp32"] < peak["fp16"] / 1.9, "matrix units are faster than plain fp32"
    assert ("bf16" in peak) == (gpu.generation != "volta")
    assert peak.get("bf16", peak["fp16"]) == peak["fp16"]
    if "fp8" in peak:
        assert peak["fp8"] / peak["fp16"] == pytest.approx(2, rel=0.03)
    assert ("fp4" in peak) == (gpu.generation == "blackwell")
    if "fp4" in peak:
        assert 2 <= peak["fp4"] / peak["fp8"] <= 3
    # operations per byte: a unit that slipped, by ten or by a thousand, is outside
    assert 32 < peak["fp16"] / gpu.memory_bandwidth < 450
    assert gpu.memory_bandwidth > gpu.nvlink_bandwidth > gpu.network_bandwidth
    for printed in re.findall(r"(\d+)GB", gpu.name):
        assert float(gpu.memory) / 1e9 == pytest.approx(float(printed), rel=MEMORY_TOLERANCE)


def test_generations_get_faster() -> None:
    order = ["V100-32GB SXM", "A100-80GB SXM", "H100-80GB SXM", "B200-SXM", "GB300"]
    gpus = [find_gpu(CATALOGUE, name) for name in order]
    for column in ("memory", "memory_bandwidth", "nvlink_bandwidth"):
        values = [getattr(gpu, column) for gpu in gpus]
        assert values[0] < values[-1]
        if column != "memory":  # an H100 has no more than an A100
            assert values == sorted(values)
    rates = [gpu.peak["fp16"] for gpu in gpus]
    assert rates == sorted(rates)


@pytest.mark.parametrize("name", ["a100x1", "a100x64", "h100x16", "gb200nvl72"])
def test_catalogue_and_packaged_profiles_agree(name: str) -> None:
    loaded = load_profile(PACKAGED_PROFILES / f"{name}.yaml")
    gpu = find_gpu(CATALOGUE, loaded.document.gpu.type, loaded.document.gpu.memory)
    for precision, rate in loaded.document.gpu.peak.items():
        assert rate == pytest.approx(gpu.peak[precision], rel=2e-3)
    assert gpu.nvlink_bandwidth == loaded.document.nvlink.bandwidth
    assert gpu.per_node == loaded.document.gpu.per_node


@pytest.mark.parametrize(
    ("name", "memory_bytes", "expected"),
    [
        ("a100", 81920 * 2**20, "A100-80GB SXM"),  # nvidia-smi
        ("a100", 80e9, "A100-80GB SXM"),  # the box
        ("a100", 79.2 * GIB, "A100-80GB SXM"),  # torch
        ("a100", 40e9, "A100-40GB SXM"),
        ("a100-pcie", 40960 * 2**20, "A100-40GB PCIe"),
        ("h100", 94e9, "H100-94GB NVL"),
        ("h100", 80e9, "H100-80GB SXM"),
        ("v100", 32e9, "V100-32GB SXM"),
        ("gb200", 186e9, "GB200"),
        ("a100", 16 * GIB, None),
        ("a100", 60 * GIB, None),
        ("a100", 70e9, None),
        ("b200", 141e9, None),
        ("mi999", 80e9, None),
    ],
)
def test_memory_tells_models_of_one_name_apart(
    name: str, memory_bytes: float, expected: str | None
) -> None:
    found = match_gpu(CATALOGUE, name, memory_bytes)
    assert (found.name if found else None) == expected


def refused(*arguments: object) -> Problem:
    with pytest.raises(InvalidInputError) as caught:
        find_gpu(CATALOGUE, *arguments)  # type: ignore[arg-type]
    [problem] = caught.value.problems
    return problem


def test_unknown_gpu_is_refused_with_its_place_and_how_to_add_it() -> None:
    problem = refused("mi300", 192e9, "site.yaml:12")
    assert str(problem) == "site.yaml:12: GPU `mi300` is not in the catalogue"
    assert problem.hint == (
        "did you mean `MI300X`? to add it, describe it: `gpu.peak` and `gpu.memory_bandwidth` in "
        "the profile, or an entry in a `gpus.yaml` beside the profiles"
    )
    assert str(refused("zzz", None, "--set")) == "--set: GPU `zzz` is not in the catalogue"
    assert str(refused("zzz")) == "GPU `zzz` is not in the catalogue"
    hint = refused("zzz").hint
    assert hint is not None and all(gpu.name in hint for gpu in CATALOGUE.gpus)


def test_wrong_memory_is_refused_with_what_there_is() -> None:
    problem = refused("a100", 16 * GIB, "site.yaml:3")
    assert str(problem) == (
        "site.yaml:3: GPU `a100` with 16.0 GiB is not in the catalogue, which has it with "
        "40.0 GiB (A100-40GB SXM), 80.0 GiB (A100-80GB SXM)"
    )
    assert problem.hint is not None and "`gpu.model`" in problem.hint


def profile_file(tmp_path: Path, **replace: str) -> Path:
    """A profile whose GPU section is replaced line by line: `type` -> the new line."""
    text = PROFILE
    for key, line in replace.items():
        text, count = re.subn(rf"(?<=\n)(gpu:\n(?:  .*\n)*?)  {key}:.*\n", rf"\1  {line}\n", text)
        assert count == 1, key
    file = tmp_path / "site.yaml"
    file.write_text(text)
    return file


def test_a_profile_goes_before_the_catalogue(tmp_path: Path) -> None:
    loaded = load_profile(
        profile_file(tmp_path, memory="memory: 81920MiB\n  memory_bandwidth: 1GB/s")
    )
    gpu, sheet = cluster_gpu(CATALOGUE, loaded.document), find_gpu(CATALOGUE, "A100-80GB SXM")
    assert (gpu.name, gpu.generation) == ("A100-80GB SXM", "ampere")
    assert gpu.memory_bandwidth == 1e9 != sheet.memory_bandwidth
    assert gpu.peak["fp16"] == sheet.peak["fp16"], "the profile says nothing about fp16"
    assert gpu.nvlink_domain == loaded.document.nvlink.domain
    network = loaded.document.network
    assert gpu.network_bandwidth == network.nic_bandwidth * network.nics_per_node / 8


def test_model_of_a_profile_is_taken_whatever_type_and_memory_say(tmp_path: Path) -> None:
    file = profile_file(
        tmp_path, type="type: our-own\n  model: A100-40GB PCIe", memory="memory: 30GiB"
    )
    gpu = cluster_gpu(CATALOGUE, load_profile(file).document)
    assert (gpu.name, gpu.memory, gpu.memory_bandwidth) == ("A100-40GB PCIe", 30 * GIB, 1555e9)


def test_a_gpu_that_the_profile_describes_needs_no_catalogue(tmp_path: Path) -> None:
    file = profile_file(tmp_path, type="type: x9\n  memory_bandwidth: 7TB/s")
    gpu = cluster_gpu(CATALOGUE, load_profile(file).document)
    assert (gpu.name, gpu.generation, gpu.memory_bandwidth) == ("x9", "other", 7e12)
    assert gpu.peak == load_profile(file).document.gpu.peak


@pytest.mark.parametrize("line", ["type: x9", "type: a100\n  model: x9"])
def test_a_gpu_that_nobody_describes_is_refused_at_its_line(tmp_path: Path, line: str) -> None:
    loaded = load_profile(profile_file(tmp_path, type=line))
    with pytest.raises(InvalidInputError) as caught:
        cluster_gpu(CATALOGUE, loaded.document, loaded.origin)
    [problem] = caught.value.problems
    written = (tmp_path / "site.yaml").read_text().splitlines()
    assert problem.file == "site.yaml"
    assert problem.line is not None and written[problem.line - 1].split()[-1] == "x9"
    assert problem.message == "GPU `x9` is not in the catalogue"


def test_a_site_adds_and_replaces_gpus(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for directory, text in ((near, OWN), (far, OWN.replace("16GiB", "8GiB"))):
        directory.mkdir()
        (directory / "gpus.yaml").write_text(text)
    own = load_catalogue([near, tmp_path / "none", far])
    assert find_gpu(own, "x1-16gb").memory == 16 * GIB
    assert own.names.count("X1") == 1 and set(CATALOGUE.names) < set(own.names)
    assert "X1" not in load_catalogue().names
    (near / "gpus.yaml").write_text(OWN.replace("X1", "H100-80GB SXM").replace("x1-16gb", "h100"))
    mine = load_catalogue([near])
    assert find_gpu(mine, "h100").source == "our own measurement"
    assert len(mine.gpus) == len(CATALOGUE.gpus)


def test_gpus_of_a_site_are_no_profile(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text(OWN)
    (tmp_path / "mine.yaml").write_text("")
    assert set(profile_names([tmp_path])) - set(profile_names()) == {"mine"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("100TFLOP/s", "100", "6:18: `gpus[0].peak.bf16`: expected a rate such as `312TFLOP/s`"),
        ("{bf16: 100TFLOP/s}", "{}", "6:11: `gpus[0].peak`: must not be empty"),
        ("generation: other", "generation: hoper", "4:17: `gpus[0].generation`: expected `volta`"),
        ("    source: our own measurement\n", "", "2:5: `gpus[0].source`: required, but missing"),
        ("- name: X1", "- name: X1\n    price: 3", "3:5: `gpus[0].price`: unknown key"),
    ],
)
def test_mistakes_of_a_site_are_shown_with_their_place(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in OWN
    (tmp_path / "gpus.yaml").write_text(OWN.replace(old, new))
    with pytest.raises(InvalidInputError) as caught:
        load_catalogue([tmp_path])
    assert str(caught.value).startswith(f"{tmp_path}/gpus.yaml:{expected}")


def test_a_name_is_given_once() -> None:
    gpu = CATALOGUE.gpus[0]
    with pytest.raises(ValueError, match="is there 2 times: keep one"):
        GpuCatalogue(gpus=(gpu, gpu))
