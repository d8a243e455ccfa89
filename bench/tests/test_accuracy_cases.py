"""From published rows to cases: no exception but CannotModel, and what is taken from where."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import row_specimens as specimens

from bench.cases import (
    SOFTWARE,
    CannotModel,
    RowCase,
    mesh_of,
    row_case,
    software_for,
    software_key,
)
from bench.memory_facts import MEMORY_FIELDS
from bench.predictions import Predicted
from bench.published import COLUMNS, PublishedRow
from bench.published_models import model_of
from bench.published_recipes import Recipe
from hpctrain.plan.cost.case import Software
from hpctrain.plan.cost.from_spec import EAGER_NORM_TRAFFIC
from hpctrain.plan.mesh.candidate import MODULES
from hpctrain.spec.catalogue import match_gpu
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.loader import load_calibration, load_catalogue

CATALOGUE, CALIBRATION = load_catalogue(), load_calibration()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedRow]:
    return specimens.rows(tmp_path_factory.mktemp("rows"), *specimens.ALL)


def row(**cells: Any) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "A100-80GB SXM"} | cells))


def gpt(**cells: Any) -> PublishedRow:
    """A GPT of 24 layers on 16 GPUs; `cells` are further columns. dp is what tp and pp leave."""
    sizes = dict(num_layers=24, hidden=2048, heads=16, vocab=51200, seq_len=2048, gpus=16, tp=2)
    given = dict(model="GPT", source="megatron 2022", pp=2) | sizes | cells
    ranks = (given["gpus"] or 16) // ((given["tp"] or 1) * (given["pp"] or 1))
    return row(**({"dp": ranks} | given))


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
            (dict(source="MosaicML llm-foundry", framework="PyTorch FSDP"), "fsdp"),
            (dict(framework="torchtitan"), "fsdp"),
            (dict(source="Zero-Bubble PP", framework="schedule ZB-1p"), "megatron-2023"),
            (dict(source="Korthikanti 2022"), "megatron-2022"),
            (dict(source="SimuMax B200 real"), "megatron-core"),
            (dict(source="Megatron-Bridge 25.09"), "megatron-core"),
            (dict(source="dgxc-benchmarking v25.05", framework="NeMo"), "megatron-core"),
            (dict(source="Megatron README H100 weak scaling"), "megatron-core"),
            (dict(framework="DeepSpeed"), "deepspeed"),
        ],
    )
    def test_names(self, cells: dict[str, str], key: str) -> None:
        assert software_key(row(**cells)) == (key, False)

    @pytest.mark.parametrize("gpu", ["GB200-NVL72", "B300-SXM", "H100", "GH200", "A100", ""])
    def test_what_no_source_names_is_a_guess_that_the_calibration_knows(self, gpu: str) -> None:
        key, guessed = software_key(row(gpu=gpu))
        assert guessed
        assert key in CALIBRATION.software

    def test_a_guess_is_an_assumption(self) -> None:
        found = case(gpt(source=""))
        assert f"software {found.software}" in found.assumed
        assert not any("software" in one for one in case(gpt()).assumed)

    def test_every_key_is_in_the_calibration(self) -> None:
        named = {key for _, key in SOFTWARE} | {"scaling-unfused-norms"}
        assert named <= set(CALIBRATION.software)
        assert {"alltoall", "allgather", "deepep", "hybridep"} <= set(CALIBRATION.dispatch)
        assert {"none", "layer", "full"} <= set(CALIBRATION.graphs)
        assert {"flash1", "flash2", "te", "fused", "torch"} <= set(CALIBRATION.attention)

    def test_notes_choose_the_attention_kernel(self) -> None:
        aleph = dict(source="Aleph Alpha layouts")
        torch = case(gpt(**aleph, notes="attention kernel: torch")).case.software
        flash = case(gpt(**aleph, notes="attention kernel: flash_attention2 + RMS kernel"))
        assert torch.flash == 0
        assert torch.softmax_passes == CALIBRATION.attention["torch"].softmax_passes
        assert flash.case.software.flash == 1
        assert flash.attention == "flash2"

    @pytest.mark.parametrize("product", [False, True])
    @pytest.mark.parametrize(
        ("names", "precision", "expected"),
        [  # (split over tp, all-reduced, bytes of a sum, bytes of adding without the first)
            (("Aleph Alpha layouts", "Aleph Alpha Scaling"), "bf16", (0, 1, 4, 6)),
            (("BLOOM prequel sweep", "Megatron-DeepSpeed"), "fp16", (1, 0, 2, 6)),
            (("BLOOM prequel sweep", "Megatron-DeepSpeed"), "bf16", (1, 1, 4, 10)),
            (("MosaicML llm-foundry", "MosaicML FSDP"), "bf16", (0, 0, 4, 18)),
            (("SimuMax B200 real", "Megatron-core"), "bf16", (0, 0, 4, 0)),
        ],
    )
    def test_what_a_framework_does_in_its_own_way_is_in_both_views(
        self, product: bool, names: tuple[str, str], precision: str, expected: tuple[float, ...]
    ) -> None:
        sizes = dict(gpus=8, tp=1, pp=1, dp=8, micro_batch=1, global_batch=8000)
        source, framework = names
        row = gpt(source=source, framework=framework, precision=precision, **sizes)
        one = row_case(row, CATALOGUE, CALIBRATION, product).case
        found = (
            one.software.scatter_gather,
            one.mesh.whole_sums,
            one.mesh.summed_bytes,
            one.mesh.added_bytes,
        )
        assert found == pytest.approx(expected, rel=2e-3)

    def test_norms_without_their_kernel_move_more(self) -> None:
        aleph = dict(source="Aleph Alpha layouts")
        plain = case(gpt(**aleph, notes="attention kernel: flash_attention2"))
        fused = case(gpt(**aleph, notes="attention kernel: flash_attention2 + RMS kernel"))
        silent = case(gpt(**aleph))
        assert (plain.unfused_norms, fused.unfused_norms) == (True, False)
        traffic = [one.case.software.norm_traffic for one in (plain, fused, silent)]
        assert traffic == [EAGER_NORM_TRAFFIC, 1, 1]
        assert plain.case.software.streaming == CALIBRATION.software["scaling"].streaming

    @pytest.mark.parametrize(("word", "kind"), [("1F1B", 0), ("ZB-1p", 1), ("ZB-2p", 2)])
    def test_schedules(self, word: str, kind: int) -> None:
        one = gpt(source="Zero-Bubble PP", framework=f"Megatron-LM fork, schedule {word}")
        assert case(one).case.software.zero_bubble == kind


class TestRecipes:
    """What a recipe changes about the generation of software."""

    @staticmethod
    def software(gpu: str = "H100-80GB SXM", **settings: Any) -> Software:
        recipe = Recipe(precision="bf16", **settings)
        made = match_gpu(CATALOGUE, gpu)
        assert made is not None
        return software_for(recipe, CALIBRATION, "megatron-core", made)[0]

    def test_cuda_graphs_leave_fewer_launches(self) -> None:
        plain, graphs, all_of_it = (self.software(graphs=one) for one in ("none", "layer", "full"))
        assert (plain.launched_layers, plain.launched_experts) == (1, 1)
        assert (graphs.launched_layers, graphs.launched_experts) == (
            CALIBRATION.graphs["layer"].layers,
            1,
        )
        assert (all_of_it.launched_layers, all_of_it.launched_experts) == (0, 0)

    def test_dispatchers(self) -> None:
        for name, one_copy in (("alltoall", 0), ("deepep", 1), ("hybridep", 1)):
            found = self.software(dispatcher=name)
            assert found.dispatch_efficiency == CALIBRATION.dispatch[name].efficiency
            assert found.one_copy == one_copy
            assert found.overlaps_experts == 0
        assert self.software(dispatcher="alltoall", moe_overlap=True).overlaps_experts == 1

    def test_what_overlaps(self) -> None:
        none = self.software(
            tp_overlap=False, grad_overlap=False, param_overlap=False, p2p_overlap=False
        )
        switches = [
            *("overlaps_tensors", "overlaps_gradients", "overlaps_parameters", "overlaps_stages")
        ]
        assert [getattr(none, name) for name in switches] == [0, 0, 0, 0]
        every = self.software(tp_overlap=True, p2p_overlap=True)
        assert [getattr(every, name) for name in switches] == [1, 1, 1, 1]

    def test_older_kernels_are_slower_on_newer_gpus(self) -> None:
        old = CALIBRATION.attention["flash2"]
        assert self.software(attention="flash2").flash_speed == old.newer_speed < 1
        assert self.software("A100-80GB SXM", attention="flash2").flash_speed == 1
        assert self.software(attention="te").flash_speed == 1

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
        assert mesh.again_core_attn == int(cells["recompute"] == "selective")

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

    @pytest.mark.parametrize("module", MODULES)
    def test_modules_of_megatron(self, module: str) -> None:
        recipe = Recipe(precision="bf16", recompute="selective", recompute_modules=(module,))
        software = CALIBRATION.software["megatron-core"]
        mesh = mesh_of(gpt(), model_of(gpt()), recipe, software, [])
        assert [name for name in MODULES if getattr(mesh, f"again_{name}")] == [module]

    def test_a_layout_of_other_gpus_is_refused(self) -> None:
        with pytest.raises(CannotModel, match="dp 4 are not the 64 GPUs"):
            case(gpt(gpus=64, dp=4))
        assert case(gpt(gpus=64, dp=None)).case.mesh.dp == 16
        assert case(gpt(gpus=None)).case.mesh.dp == 4

    def test_racks_of_72_are_used_in_powers_of_two(self) -> None:
        assert case(gpt(gpu="GB200-NVL72")).case.machine.domain == 64
        assert case(gpt()).case.machine.domain == 8

    def test_one_layer_per_chunk_of_the_zero_bubble_paper(self) -> None:
        one = gpt(source="Zero-Bubble PP", framework="fork, schedule 1F1B-I", vp=None, pp=4)
        assert case(one).case.mesh.vpp == 6  # 24 layers over 4 stages


class TestExperts:
    def test_experts_that_no_model_has_are_not_divided(self) -> None:
        with pytest.raises(CannotModel, match="ep 4, but neither columns, notes nor registry"):
            case(gpt(ep=4))
        assert case(gpt(ep=1)).case.shape.moe_blocks == 0

    def test_the_notes_may_name_them(self) -> None:
        one = case(gpt(ep=4, notes="8 experts top-2"))
        assert (one.case.shape.experts, one.case.mesh.ep) == (8, 4)
        with pytest.raises(CannotModel, match="8 experts do not divide by ep 16"):
            case(gpt(ep=16, notes="8 experts top-2"))

    def test_more_ranks_than_a_stage_has(self) -> None:
        one = case(gpt(ep=16, notes="16 experts top-2"))  # tp 2 x dp 4 in each of 2 stages
        assert (one.case.mesh.ep, "ep" in one.assumed) == (8, True)
        one = case(gpt(ep=8, notes="16 experts top-2"))
        assert (one.case.mesh.ep, "ep" in one.assumed) == (8, False)

    def test_layers_of_token_prediction_only_where_they_train(self) -> None:
        sizes = dict(model="DeepSeekV3", num_layers=4, gpus=8, tp=1, ep=8, dp=8, seq_len=4096)
        bare = case(row(source="SimuMax", framework="Megatron-LM", **sizes))
        bridge = case(row(source="Megatron-Bridge 26.02", framework="Megatron-Bridge", **sizes))
        assert (bare.case.shape.mtp_layers, bridge.case.shape.mtp_layers) == (0, 1)


class TestProduct:
    """What `hpctrain plan` takes, whoever measured the row."""

    @pytest.mark.parametrize(
        ("cells", "key"),
        [
            (dict(source="Megatron-Bridge 26.02", framework="Megatron-Bridge"), "megatron"),
            (dict(source="MosaicML llm-foundry", framework="PyTorch FSDP", tp=1, pp=1), "fsdp"),
            (dict(source="DeepSpeed", framework="DeepSpeed ZeRO-3", tp=1, pp=1), "deepspeed"),
        ],
    )
    def test_the_software_is_that_of_the_engine(self, cells: dict[str, Any], key: str) -> None:
        one = row_case(gpt(**cells), CATALOGUE, CALIBRATION, product=True)
        assert one.software == abilities_of(key).calibration
        assert "software" not in " ".join(one.assumed)

    @pytest.mark.parametrize(
        ("cells", "key"),
        [
            (dict(source="Narayanan2021", framework="Megatron-LM"), "megatron-2022"),
            (dict(notes="attention kernel: torch"), "hugging-face"),
            (dict(notes="attention kernel: flash_attention2 + RMS kernel"), "hugging-face"),
        ],
    )
    def test_it_has_no_kernels_that_the_run_says_it_lacked(
        self, cells: dict[str, Any], key: str
    ) -> None:
        found = row_case(gpt(**cells), CATALOGUE, CALIBRATION, product=True)
        assert found.software == key
        assert found.case.software.scatter_gather == 0

    def test_overlaps_are_those_that_the_run_switched_on(self) -> None:
        def software(**cells: Any) -> Software:
            given = dict(source="NeMo", framework="NeMo 2") | cells
            return row_case(gpt(**given), CATALOGUE, CALIBRATION, product=True).case.software

        whole, none = software(), software(notes="no comm overlap")
        switches = ("overlaps_tensors", "overlaps_gradients", "overlaps_parameters")
        assert [getattr(whole, name) for name in switches] == [1, 1, 1]
        assert [getattr(none, name) for name in switches] == [0, 0, 0]

    def test_what_is_in_memory_is_that_of_the_framework_that_the_row_names(self) -> None:
        def both(framework: str) -> list[Software]:
            one = gpt(source="a paper", framework=framework, notes="attention kernel: flash_attn2")
            views = (True, False)
            return [row_case(one, CATALOGUE, CALIBRATION, product=v).case.software for v in views]

        for framework in ("Megatron-DeepSpeed", "Aleph Alpha Scaling", "Megatron-core"):
            product, own = both(framework)
            memory = {name: getattr(own, name) for name in MEMORY_FIELDS}
            assert {name: getattr(product, name) for name in MEMORY_FIELDS} == memory
            assert product.gathered_logits == own.gathered_logits
            assert product.flat_copies == own.flat_copies
        assert both("Aleph Alpha Scaling")[0].gathered_logits == 1
        assert both("Megatron-DeepSpeed")[0].slack > both("Megatron-core")[0].slack == 1

    def test_the_software_of_the_source_does_not_matter(self) -> None:
        cells = dict(framework="Megatron-core", notes="no comm overlap", zero_stage=1)
        cells |= dict(recompute="none", sequence_parallel=True, precision="bf16")
        sources = ("SimuMax", "SimuMax of another cluster, NeMo")
        rows = [gpt(source=source, **cells) for source in sources]
        seconds = [
            Predicted([row_case(one, CATALOGUE, CALIBRATION, True)], [], []).seconds[0]
            for one in rows
        ]
        assert seconds[0] == seconds[1]


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
        for precision, more in (("bf16", 5.2), ("fp16", 0)):
            one = case(gpt(source="BLOOM prequel sweep", precision=precision))
            assert one.case.mesh.gradient_bytes == own + more
