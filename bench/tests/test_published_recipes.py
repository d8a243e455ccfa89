"""How published runs trained: rules, the Megatron-Bridge table, notes and columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.model_registry import load_registry
from bench.published import PublishedRow
from bench.published_recipes import bridge_cell, load_bridge, load_rules, recipe_of


def row(**cells: object) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "H100-80GB SXM"} | cells))


class TestRecipes:
    def bridge(self, **cells: object) -> PublishedRow:
        given = {"source": "Megatron-Bridge 26.02", "framework": "Megatron-Bridge/core"}
        return row(**(given | {"precision": "mxfp8", "gpu": "GB200"} | cells))

    def test_megatron_of_2021(self) -> None:
        given = row(source="Narayanan2021 T1", framework="Megatron-LM", gpu="A100-80GB SXM")
        recipe = recipe_of(replace(given, tp=8, pp=8, vp=2))
        assert (recipe.recompute, recipe.zero, recipe.sequence_parallel) == ("full", 0, False)
        assert (recipe.attention, recipe.grad_overlap, recipe.schedule) == (
            "fused",
            False,
            "interleaved",
        )

    def test_columns_overrule_rules(self) -> None:
        given = row(source="BLOOM prequel sweep", framework="Megatron-DeepSpeed")
        assert recipe_of(given).recompute == "full"
        recipe = recipe_of(replace(given, recompute="none", zero_stage=0, micro_batch=2))
        assert (recipe.recompute, recipe.zero, recipe.micro_batch) == ("none", 0, 2)
        assert "recompute" not in recipe.filled
        assert "vp" in recipe.filled

    def test_sequence_parallel_follows_tp(self) -> None:
        given = self.bridge(model="LLAMA3.1_405B", gpu="H100-80GB SXM", precision="fp8")
        parallel = recipe_of(replace(given, tp=8))
        assert (parallel.sequence_parallel, parallel.tp_overlap, parallel.fp8_params) == (
            True,
            True,
            True,
        )
        alone = recipe_of(replace(given, tp=1))
        assert (alone.sequence_parallel, alone.tp_overlap) == (False, False)

    def test_no_tp_overlap_without_tp_though_a_recipe_switches_it_on(self) -> None:
        given = self.bridge(source="Megatron-Bridge 25.09", model="Qwen3_235B_a22B", gpu="H100")
        given = replace(given, precision="fp8")
        assert [recipe_of(replace(given, tp=tp)).tp_overlap for tp in (1, 2)] == [False, True]

    def test_bridge_table(self) -> None:
        recipe = recipe_of(self.bridge(model="DeepSeekV3", tp=1, pp=4, vp=4, ep=64))
        assert (recipe.graphs, recipe.graph_scope) == (
            "layer",
            ("attn", "moe_router", "moe_preprocess"),
        )
        assert (recipe.dispatcher, recipe.moment_dtype) == ("hybridep", "bf16")
        assert recipe.recompute_modules == ("mla_up_proj",)
        assert recipe.layout == "Et*4|(t*4|)*14tmL"

    def test_a_later_container_differs(self) -> None:
        given = self.bridge(model="DeepSeekV3", tp=1, pp=4, vp=4, ep=64)
        later = recipe_of(replace(given, source="Megatron-Bridge 26.06"))
        assert (later.graphs, later.moe_overlap) == ("full", True)

    def test_an_unknown_container_takes_the_one_before(self) -> None:
        given = self.bridge(model="DeepSeekV3", tp=1, pp=4, vp=4, ep=64)
        between = recipe_of(replace(given, source="Megatron-Bridge 26.03"))
        assert between.graphs == "layer"
        assert "bridge-table" in between.rules
        older = recipe_of(replace(given, source="Megatron-Bridge 25.01"))
        assert "bridge-table" not in older.rules

    def test_several_settings_of_one_cell_are_told_apart_by_layout(self) -> None:
        """26.06, DeepSeek-V3 on B200: PP16 without graphs, PP8 VP2 with DeepEP and graphs."""
        given = self.bridge(
            model="DeepSeekV3", source="Megatron-Bridge 26.06", gpu="B200-SXM", tp=1
        )
        deep = recipe_of(replace(given, pp=8, vp=2, ep=32, cp=1, micro_batch=1))
        flat = recipe_of(replace(given, pp=16, ep=8, cp=1, micro_batch=1))
        assert [(r.dispatcher, r.graphs) for r in (deep, flat)] == [
            ("deepep", "layer"),
            ("hybridep", "none"),
        ]

    def test_token_drop(self) -> None:
        given = self.bridge(source="Megatron-Bridge 25.09", model="Qwen3_235B_a22B (tokendrop)")
        assert recipe_of(given).capacity_factor == 1.0
        assert recipe_of(self.bridge(model="Qwen3_235B_a22B")).capacity_factor == 0.0

    @pytest.mark.parametrize(
        ("schedule", "name"),
        [("1F1B", "1f1b"), ("1F1B-I", "interleaved"), ("ZB-1p", "zb-1p"), ("ZB-2p", "zb-2p")],
    )
    def test_zero_bubble_schedules(self, schedule: str, name: str) -> None:
        framework = f"Megatron-LM fork, schedule {schedule}"
        given = row(source="Zero-Bubble PP", framework=framework, gpu="A100", pp=8)
        assert (recipe_of(given).schedule, recipe_of(given).recompute) == (name, "none")

    def test_llm_foundry_gradients(self) -> None:
        given = row(source="MosaicML llm-foundry", framework="PyTorch FSDP (Composer/llm-foundry)")
        dtypes = [
            recipe_of(replace(given, notes=f"MP mode {mode}")).grad_dtype
            for mode in ("PURE", "DEFAULT")
        ]
        assert dtypes == ["bf16", "fp32"]
        assert (recipe_of(given).engine, recipe_of(given).zero) == ("fsdp", 3)

    def test_nvfp4_gathers_no_fp8_and_blocks_neither(self) -> None:
        given = self.bridge(model="LLAMA3_70B", tp=2)
        flags = [
            recipe_of(replace(given, precision=p)).fp8_params
            for p in ("mxfp8", "fp8-cs", "fp8-sc", "nvfp4", "bf16")
        ]
        assert flags == [True, True, False, False, False]

    @pytest.mark.parametrize(
        ("cells", "mtp"),
        [
            (dict(source="Megatron-Bridge 26.06", framework="Megatron-Bridge/core"), True),
            (dict(source="dgxc-benchmarking v25.08", framework="NeMo 2 / Megatron-core"), True),
            (dict(source="Megatron-MoE-ModelZoo", framework="Megatron-core"), True),
            (dict(source="NeMo AutoModel", framework="NeMo AutoModel (PyTorch)"), False),
            (dict(source="SimuMax B200 real", framework="Megatron-LM 23e00ed"), False),
            (dict(source="a paper", framework="Megatron-core"), False),
            (dict(source="a paper", framework="Megatron-core", notes="1 MTP layer"), True),
            (dict(source="Megatron-Bridge 26.06", model="DeepSeekV3 (w/o MTP)"), False),
        ],
    )
    def test_mtp_only_where_a_recipe_or_the_row_has_it(
        self, cells: dict[str, str], mtp: bool
    ) -> None:
        given = {"model": "DeepSeekV3", "framework": "Megatron-Bridge"} | cells
        assert recipe_of(row(**given)).mtp is mtp

    def test_nemo_automodel_is_not_nemo(self) -> None:
        """NeMo's rules would recompute three modules, gather in 8 bits and overlap messages."""
        cells = dict(model="DeepSeekV3", gpu="H100-80GB SXM", gpus=256, tp=1, precision="fp8")
        auto = recipe_of(row(source="NeMo AutoModel", framework="NVIDIA-NeMo/Automodel", **cells))
        nemo = recipe_of(row(source="dgxc-benchmarking", framework="NeMo 2", **cells))
        assert {"nemo", "nemo-deepseek-h100"} <= set(nemo.rules)
        assert not any(name.startswith("nemo") for name in auto.rules)
        assert (auto.engine, auto.zero, auto.recompute, auto.fp8_params) == (
            "fsdp",
            2,
            "full",
            False,
        )

    def test_automodel_recomputes_as_its_files_say(self) -> None:
        cells = dict(source="NeMo AutoModel", framework="NeMo AutoModel")
        models = ("DeepSeekV3", "Qwen3 MoE 30B", "GPT-OSS 120B", "Llama3 70B")
        given = [recipe_of(row(model=model, **cells)) for model in models]
        assert [recipe.recompute for recipe in given] == ["full", "full", "none", "full"]
        assert [recipe.zero for recipe in given] == [2, 3, 3, 3]

    def test_megatron_fsdp_shards_parameters(self) -> None:
        """Their recipes set optim_grads_params; with states alone no 70B fits on these GPUs."""
        given = dict(source="Megatron-Bridge 26.02", framework="Megatron-Bridge/core")
        given |= dict(model="Llama3_70B", gpu="GB200", precision="bf16", tp=1, pp=1)
        recipe = recipe_of(row(**given))
        assert (recipe.engine, recipe.zero) == ("megatron-fsdp", 3)
        assert recipe_of(row(**given, zero_stage=2)).zero == 2
        assert recipe_of(row(**(given | {"gpu": "H100", "tp": 4}))).zero == 1

    def test_a_kernel_of_one_test_is_not_that_of_all(self) -> None:
        cells = dict(source="Megatron-LM CI memory_speed", framework="Megatron-core")
        assert recipe_of(row(model="GPT 7B", **cells)).attention == "te"
        assert (
            recipe_of(row(model="GPT 7B", notes="unfused attention", **cells)).attention == "fused"
        )

    def test_recipes_of_bridge_where_another_table_ran_them(self) -> None:
        cells = dict(model="DeepSeekV3", gpu="GB200", precision="mxfp8", tp=1, pp=4, vp=4, ep=64)
        other = row(source="dgxc-benchmarking v25.12", framework="Megatron-Bridge", **cells)
        own = row(source="Megatron-Bridge 25.11", framework="Megatron-Bridge", **cells)
        assert bridge_cell(own, "deepseek-v3") is not None
        assert bridge_cell(other, "deepseek-v3") == bridge_cell(own, "deepseek-v3")
        unnamed = row(source="dgxc-benchmarking v25.12", framework="NeMo 2", **cells)
        assert bridge_cell(unnamed, "deepseek-v3") is None

    def test_nothing_known(self) -> None:
        recipe = recipe_of(row(source="?", framework="?", model="?"))
        assert recipe.rules == ()
        assert set(recipe.filled) >= {"recompute", "zero_stage", "sequence_parallel", "precision"}


class TestFiles:
    def test_bridge_table_names_models_of_the_registry(self) -> None:
        assert set(load_bridge().recipes) - set(load_registry()) == set()

    def test_rule_names_are_unique(self) -> None:
        names = [rule.name for rule in (*load_rules().families, *load_rules().rules)]
        assert len(names) == len(set(names))

    def test_rules_of_the_same_cell_differ_by_layout(self) -> None:
        """A container and a precision in two lines of one GPU need layouts to choose by."""
        for model, gpus in load_bridge().recipes.items():
            for gpu, cells in gpus.items():
                seen: dict[tuple[str, str], int] = {}
                for cell in cells:
                    for container in {c for key in cell.where for c in key.split()}:
                        for precision in cell.precisions(container):
                            key = (container, precision)
                            assert key not in seen or cell.layouts, (model, gpu, key)
                            seen[key] = 1
