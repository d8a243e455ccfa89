"""From published rows to cases: no exception but CannotModel, and what is taken from where."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import row_specimens as specimens

from bench.cases import (
    BRIDGE_RELEASES,
    SOFTWARE,
    CannotModel,
    RowCase,
    bridge_key,
    mesh_of,
    row_case,
    software_for,
    software_key,
)
from bench.predictions import Predicted
from bench.published import COLUMNS, PublishedRow
from bench.published_models import model_of
from bench.published_recipes import Recipe
from hpctrain.plan.cost.case import Software
from hpctrain.spec.loader import load_calibration, load_catalogue

CATALOGUE, CALIBRATION = load_catalogue(), load_calibration()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedRow]:
    return specimens.rows(tmp_path_factory.mktemp("rows"), *specimens.ALL)


def row(**cells: Any) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "A100-80GB SXM"} | cells))


def gpt(**cells: Any) -> PublishedRow:
    """A GPT of 24 layers on 16 GPUs; `cells` are further columns."""
    sizes = dict(num_layers=24, hidden=2048, heads=16, vocab=51200, seq_len=2048, gpus=16, tp=2)
    return row(**(dict(model="GPT", source="megatron 2022", pp=2, dp=4) | sizes | cells))


def case(one: PublishedRow) -> RowCase:
    return row_case(one, CATALOGUE, CALIBRATION)


def blanked(one: PublishedRow, names: list[str]) -> PublishedRow:
    return replace(one, **{name: specimens.BLANK[name] for name in names})


def modelled(candidates: list[PublishedRow]) -> Predicted:
    """Those that can be modelled; any other exception fails the test."""
    found, refused = [], []
    for one in candidates:
        try:
            found.append(case(one))
        except CannotModel as error:
            refused.append(str(error))
    return Predicted(found, refused, [])


def assert_sensible(predicted: Predicted) -> None:
    for figures in (predicted.seconds, predicted.gibibytes, predicted.total_gibibytes):
        assert np.isfinite(figures).all()
        assert (figures > 0).all()


class TestBlankColumns:
    def test_the_specimens_themselves(self, rows: list[PublishedRow]) -> None:
        predicted = modelled(rows)
        assert predicted.refused == []
        assert_sensible(predicted)

    def test_each_column(self, rows: list[PublishedRow]) -> None:
        candidates = [blanked(one, [name]) for one in rows for name in COLUMNS]
        predicted = modelled(candidates)
        assert_sensible(predicted)
        reasons = {reason.split("`")[0].strip() for reason in predicted.refused}
        assert reasons <= {"model", "GPU"}
        assert len(predicted.refused) < len(rows) * 3

    def test_any_columns(self, rows: list[PublishedRow]) -> None:
        dice = random.Random(7)
        candidates = [
            blanked(dice.choice(rows), dice.sample(COLUMNS, dice.choice([2, 4, 8, 16])))
            for _ in range(400)
        ]
        predicted = modelled(candidates)
        assert_sensible(predicted)
        assert len(predicted.cases) > 100

    def test_columns_of_nonsense(self, rows: list[PublishedRow]) -> None:
        dice = random.Random(8)
        whole = [n for n, kind in specimens.KINDS.items() if kind == "int" and n != "line"]
        odd = [
            replace(dice.choice(rows), **{dice.choice(whole): dice.choice([0, 1, 3, 1000])})
            for _ in range(200)
        ]
        odd += [replace(one, micro_batch=0.0) for one in rows]
        assert_sensible(modelled(odd))

    @pytest.mark.parametrize(
        ("cells", "words"),
        [
            (dict(gpu="TPUv4"), "GPU `TPUv4`"),
            (dict(gpu=""), "GPU ``"),
            (dict(model="Mystery", hidden=None), "model `Mystery`: line 2: no registry entry"),
            (dict(model="T5-11B", hidden=None), "family t5 is not modelled"),
        ],
    )
    def test_reasons(self, cells: dict[str, Any], words: str) -> None:
        with pytest.raises(CannotModel, match=words):
            case(gpt(**cells))


class TestSoftware:
    @pytest.mark.parametrize(
        ("cells", "key"),
        [
            (dict(source="Narayanan2021 T2", framework="ZeRO-3 (no MP)"), "deepspeed-zero3-2021"),
            (dict(source="Narayanan2021 T2", framework="PTD-P"), "megatron-2021"),
            (dict(source="BLOOM-176B runs"), "megatron-deepspeed"),
            (dict(source="Aleph Alpha layouts", framework="Megatron-style"), "scaling"),
            (dict(source="MosaicML llm-foundry", framework="PyTorch FSDP"), "llm-foundry"),
            (dict(framework="torchtitan"), "fsdp"),
            (dict(source="Zero-Bubble PP", framework="schedule ZB-1p"), "megatron-2023"),
            (dict(source="Korthikanti 2022"), "megatron-2022"),
            (dict(source="SimuMax B200 real"), "mcore-plain"),
            (dict(source="Megatron-Bridge 25.09"), "bridge-25.09"),
            (dict(source="dgxc-benchmarking v25.05", framework="NeMo"), "nemo"),
            (dict(source="Megatron README H100 weak scaling"), "mcore"),
            (dict(framework="DeepSpeed"), "deepspeed-zero3-2021"),
        ],
    )
    def test_names(self, cells: dict[str, str], key: str) -> None:
        assert software_key(row(**cells)) == (key, False)

    @pytest.mark.parametrize("gpu", ["GB200-NVL72", "B300-SXM", "H100", "GH200", "A100", ""])
    def test_what_no_source_names_is_a_guess_that_the_calibration_knows(self, gpu: str) -> None:
        key, guessed = software_key(row(gpu=gpu))
        assert guessed
        assert key in CALIBRATION.software
        assert key.startswith("bridge-") == gpu.startswith(("GB", "B"))

    def test_a_guess_is_an_assumption(self) -> None:
        found = case(gpt(source=""))
        assert f"software {found.software}" in found.assumed
        assert not any("software" in one for one in case(gpt()).assumed)

    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ("megatron-bridge 26.04.01", "bridge-26.04"),
            ("megatron-bridge 26.03", "bridge-26.02"),
            ("megatron-bridge 27.12", "bridge-26.08"),
            ("megatron-bridge 24.07", "bridge-25.09"),
            ("megatron-bridge main", "bridge-26.02"),
        ],
    )
    def test_releases_of_bridge(self, text: str, key: str) -> None:
        assert bridge_key(text) == key

    def test_every_key_is_in_the_calibration(self) -> None:
        named = {key for _, key in SOFTWARE if key != "bridge"}
        named |= {f"bridge-{release}" for release in BRIDGE_RELEASES} | {"scaling-unfused-norms"}
        assert named <= set(CALIBRATION.software)
        assert {"alltoall", "allgather", "deepep", "hybridep"} <= set(CALIBRATION.dispatch)
        assert {"none", "layer", "full"} <= set(CALIBRATION.graphs)
        assert {"flash1", "flash2", "fused", "torch"} <= set(CALIBRATION.attention)

    def test_notes_choose_the_attention_kernel(self) -> None:
        aleph = dict(source="Aleph Alpha layouts")
        torch = case(gpt(**aleph, notes="attention kernel: torch")).case.software
        flash = case(gpt(**aleph, notes="attention kernel: flash_attention2 + RMS kernel"))
        assert torch.flash == 0
        assert torch.softmax_passes == CALIBRATION.attention["torch"].softmax_passes
        assert flash.case.software.flash == 1
        assert flash.attention == "flash2"

    def test_norms_without_their_kernel_stream_more(self) -> None:
        aleph = dict(source="Aleph Alpha layouts")
        plain = case(gpt(**aleph, notes="attention kernel: flash_attention2"))
        fused = case(gpt(**aleph, notes="attention kernel: flash_attention2 + RMS kernel"))
        unfused = CALIBRATION.software["scaling-unfused-norms"]
        assert (plain.unfused_norms, fused.unfused_norms) == (True, False)
        assert plain.case.software.streaming == unfused.streaming
        assert fused.case.software.streaming == CALIBRATION.software["scaling"].streaming

    @pytest.mark.parametrize(("word", "kind"), [("1F1B", 0), ("ZB-1p", 1), ("ZB-2p", 2)])
    def test_schedules(self, word: str, kind: int) -> None:
        one = gpt(source="Zero-Bubble PP", framework=f"Megatron-LM fork, schedule {word}")
        assert case(one).case.software.zero_bubble == kind


class TestRecipes:
    """What a recipe changes about the generation of software."""

    @staticmethod
    def software(**settings: Any) -> Software:
        recipe = Recipe(precision="bf16", **settings)
        return software_for(gpt(), recipe, CALIBRATION, "bridge-26.02")[0]

    def test_cuda_graphs_shorten_launches(self) -> None:
        plain, graphs = self.software(), self.software(graphs="full")
        left = CALIBRATION.graphs["full"]
        assert plain.layer_overhead == CALIBRATION.software["bridge-26.02"].layer_overhead
        assert graphs.layer_overhead == pytest.approx(left * plain.layer_overhead)
        assert graphs.expert_overhead == pytest.approx(left * plain.expert_overhead)

    def test_overlap_of_experts(self) -> None:
        for name in ("alltoall", "deepep", "hybridep"):
            found = self.software(dispatcher=name).ep_overlap
            assert found == CALIBRATION.dispatch[name].overlap
        assert self.software(dispatcher="alltoall", moe_overlap=True).ep_overlap == 0.9

    def test_overlap_of_gradients_and_their_moments(self) -> None:
        assert self.software(grad_overlap=False).dp_overlap == 0
        assert self.software().dp_overlap > 0
        assert self.software(moment_dtype="bf16").main_bytes == self.software().main_bytes - 4

    @pytest.mark.parametrize(
        ("attention", "flash"), [("torch", 0), ("fused", 0), ("flash2", 1), ("te", 1)]
    )
    def test_attention(self, attention: str, flash: int) -> None:
        assert self.software(attention=attention).flash == flash

    @pytest.mark.parametrize(
        ("precision", "low"), [("nvfp4", "fp4"), ("mxfp8", "fp8"), ("fp8", "fp8"), ("bf16", "bf16")]
    )
    def test_peaks(self, precision: str, low: str) -> None:
        found = case(gpt(gpu="B200-SXM", precision=precision))
        assert found.case.machine.peak == found.gpu.peak["bf16"]
        assert found.case.machine.peak_low == found.gpu.peak[low]


class TestMesh:
    def test_sizes_and_batch(self) -> None:
        mesh = case(gpt(micro_batch=2.0, global_batch=64, sequence_parallel=True)).case.mesh
        assert (mesh.tp, mesh.pp, mesh.dp, mesh.gpus) == (2, 2, 4, 16)
        assert (mesh.micro_batch, mesh.accumulation) == (2, 8)
        assert mesh.sequence_parallel == 1

    def test_blank_data_parallelism_is_what_is_left_of_the_gpus(self) -> None:
        assert case(gpt(dp=None, gpus=64)).case.mesh.dp == 16

    def test_blank_sizes_are_named(self) -> None:
        assumed = case(gpt(pp=None, cp=None, global_batch=None, ep=None)).assumed
        assert {"pp", "cp", "global_batch"} <= set(assumed)
        assert "ep" not in assumed and "tp" not in assumed

    @pytest.mark.parametrize(
        ("cells", "expected"),
        [
            (dict(recompute="none"), (0, 1.0)),
            (dict(recompute="selective"), (1, 1.0)),
            (dict(recompute="full"), (2, 1.0)),
            (dict(recompute="full 3 layers"), (2, 0.25)),
            (dict(recompute="full 99 layers"), (2, 1.0)),
        ],
    )
    def test_recomputation(self, cells: dict[str, str], expected: tuple[int, float]) -> None:
        mesh = case(gpt(**cells)).case.mesh
        assert (mesh.recompute, mesh.full_share_of(mesh.layers_first)) == expected
        assert mesh.again_core == int(cells["recompute"] == "selective")

    @pytest.mark.parametrize(
        ("precision", "low", "element"),
        [("bf16", 0, 2), ("fp8", 1, 2), ("nvfp4", 1, 2), ("fp32", 0, 4), ("tf32", 0, 4)],
    )
    def test_precisions(self, precision: str, low: int, element: int) -> None:
        mesh = case(gpt(precision=precision)).case.mesh
        assert (mesh.low, mesh.element_bytes) == (low, element)

    def test_forms_of_weights_and_what_is_gathered(self) -> None:
        bridge = dict(source="Megatron-Bridge 26.02", gpu="B200-SXM", tp=1, pp=1)
        meshes = [
            case(gpt(**bridge, precision=precision)).case.mesh for precision in ("bf16", "mxfp8")
        ]
        assert [mesh.low_bytes for mesh in meshes] == [0, 2 * (1 + 1 / 32)]
        assert [(mesh.low_only, mesh.gather_bytes) for mesh in meshes] == [(0, 2), (1, 2)]

    @pytest.mark.parametrize(
        ("module", "field"),
        [
            ("core_attn", "core"),
            ("mlp", "mlp"),
            ("moe", "moe"),
            ("moe_act", "activation"),
            ("layernorm", "norm"),
            ("mla_up_proj", "up"),
        ],
    )
    def test_modules_of_megatron(self, module: str, field: str) -> None:
        recipe = Recipe(precision="bf16", recompute="selective", recompute_modules=(module,))
        software = CALIBRATION.software["mcore"]
        mesh = mesh_of(gpt(), model_of(gpt()), recipe, software, [])
        kinds = ("core", "mlp", "moe", "activation", "norm", "up")
        assert [kind for kind in kinds if getattr(mesh, f"again_{kind}")] == [field]

    def test_racks_of_72_are_used_in_powers_of_two(self) -> None:
        assert case(gpt(gpu="GB200-NVL72")).case.machine.domain == 64
        assert case(gpt()).case.machine.domain == 8

    def test_one_layer_per_chunk_of_the_zero_bubble_paper(self) -> None:
        one = gpt(source="Zero-Bubble PP", framework="fork, schedule 1F1B-I", vp=None, pp=4)
        assert case(one).case.mesh.vpp == 6  # 24 layers over 4 stages


class TestRulesForBlanks:
    @pytest.mark.parametrize(
        ("cells", "expected"),
        [
            (dict(micro_batch=2.0, global_batch=64), (2, 8)),
            (dict(micro_batch=None, global_batch=64), (1, 16)),
            (dict(micro_batch=None, global_batch=None), (1, 1)),
            (dict(micro_batch=8.0, global_batch=16), (8, 1)),  # less than one microbatch each
        ],
    )
    def test_batch(self, cells: dict[str, Any], expected: tuple[int, int]) -> None:
        mesh = case(gpt(**cells)).case.mesh
        assert (mesh.micro_batch, mesh.accumulation) == expected

    @pytest.mark.parametrize(
        ("cells", "micro"),
        [
            (dict(pp=1, dp=8, global_batch=64), 4),
            (dict(pp=None, dp=8, global_batch=64), 4),
            (dict(pp=1, dp=8, global_batch=24), 3),
            (dict(pp=2, dp=4, global_batch=64), 1),
            (dict(pp=1, dp=8, global_batch=64, micro_batch=2.0), 2),
        ],
    )
    def test_readme_of_megatron_weak_scaling(self, cells: dict[str, Any], micro: int) -> None:
        one = gpt(**{"source": "Megatron README H100 weak scaling", "micro_batch": None} | cells)
        assert case(one).case.mesh.micro_batch == micro

    @pytest.mark.parametrize(
        ("cells", "chunks"),
        [
            (dict(), 6),  # the finest split of 12 layers that is at most 8
            (dict(num_layers=32), 8),
            (dict(pp=1), 1),
            (dict(vp=3), 3),
            (dict(num_layers=25), 1),  # does not divide: 1F1B
            (dict(source="megatron 2022"), 1),
        ],
    )
    def test_chunks_of_the_readme(self, cells: dict[str, Any], chunks: int) -> None:
        one = gpt(**{"source": "Megatron README H100 weak scaling", "vp": None} | cells)
        assert case(one).case.mesh.vpp == chunks

    def test_uneven_layers_have_chunks_of_one(self) -> None:
        # embedding and loss count: (31 + 2) / 8
        one = gpt(source="Zero-Bubble PP", framework="fork, schedule 1F1B-I", pp=8, num_layers=31)
        assert case(one).case.mesh.vpp == 5

    @pytest.mark.parametrize(
        ("cells", "expected"),
        [
            (dict(source="MosaicML llm-foundry", notes="MP mode PURE"), 2),
            (dict(source="MosaicML llm-foundry", notes="MP mode DEFAULT"), 4),
            (dict(source="SimuMax", precision="bf16"), 4),
            (dict(source="SimuMax", precision="fp32"), 4),
        ],
    )
    def test_bytes_of_gradients(self, cells: dict[str, Any], expected: float) -> None:
        assert case(gpt(**cells)).case.mesh.gradient_bytes == expected

    def test_bloom_accumulates_its_16_bit_gradients_in_32(self) -> None:
        own = CALIBRATION.software["megatron-deepspeed"].gradient_bytes
        for precision, more in (("bf16", 4), ("fp16", 0)):
            one = case(gpt(source="BLOOM prequel sweep", precision=precision))
            assert one.case.mesh.gradient_bytes == own + more
