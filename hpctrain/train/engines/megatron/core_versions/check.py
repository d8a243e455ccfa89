"""Check megatron-core before any process group exists: its version, and the names that are used.

`tests/engines/test_core_names.py` compares the list of names with the imports of the package; names
that only one version has stand in its row. Belongs here: the list, what is refused and what is
warned about. Does not belong here: the agreement of all ranks (see
`hpctrain.train.software_agreement`), options of the classes (a test builds them).
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.train import megatron_on_cpu, software
from hpctrain.train.engines.megatron.core_versions.supported import (
    SUPPORTED,
    CoreName,
    is_tested,
    release_numbers,
    row_of,
    tested_numbers,
)
from hpctrain.train.software import LibraryFindings, LibraryProblem

# Documented, or used by Megatron-LM's own programs. An empty name: the module itself.
_PUBLIC: Mapping[str, tuple[str, ...]] = {
    "megatron.core.activations": ("quick_gelu", "squared_relu"),
    "megatron.core.datasets.blended_megatron_dataset_builder": ("BlendedMegatronDatasetBuilder",),
    "megatron.core.datasets.gpt_dataset": ("GPTDataset", "GPTDatasetConfig", "MockGPTDataset"),
    "megatron.core.datasets.indexed_dataset": (
        "DType",
        "IndexedDataset",
        "IndexedDatasetBuilder",
        "get_bin_path",
        "get_idx_path",
    ),
    "megatron.core.dist_checkpointing": ("load", "save"),
    "megatron.core.dist_checkpointing.mapping": (
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
    "megatron.core.dist_checkpointing.serialization": (
        "get_default_load_sharded_strategy",
        "get_default_save_sharded_strategy",
        "load_common_state_dict",
        "load_content_metadata",
        "load_tensors_metadata",
    ),
    "megatron.core.dist_checkpointing.strategies.async_utils": (
        "AsyncRequest.async_fn",
        "AsyncRequest.async_fn_args",
        "AsyncRequest.finalize_fns",
    ),
    "megatron.core.dist_checkpointing.strategies.fully_parallel": (
        "FullyParallelLoadStrategyWrapper",
        "FullyParallelSaveStrategyWrapper",
    ),
    "megatron.core.dist_checkpointing.validation": ("StrictHandling.RETURN_ALL",),
    "megatron.core.distributed": (
        "DistributedDataParallel.broadcast_params",
        "DistributedDataParallel.no_sync",
        "DistributedDataParallel.start_param_sync",
        "DistributedDataParallel.zero_grad_buffer",
        "DistributedDataParallelConfig",
        "finalize_model_grads",
    ),
    "megatron.core.extensions.transformer_engine": ("TEColumnParallelLinear", "TENorm"),
    "megatron.core.fusions.fused_bias_dropout": ("get_bias_dropout_add",),
    "megatron.core.models.bert.bert_layer_specs": (
        "bert_layer_local_spec",
        "get_bert_layer_with_transformer_engine_spec",
    ),
    "megatron.core.models.bert.bert_model": ("BertModel",),
    "megatron.core.models.common.embeddings.rotary_pos_embedding": ("RotaryEmbedding",),
    "megatron.core.models.gpt": ("GPTModel",),
    "megatron.core.models.gpt.gpt_layer_specs": (
        "get_gpt_decoder_block_spec",
        "get_gpt_decoder_layer_specs",
        "get_gpt_mtp_block_spec",
    ),
    "megatron.core.num_microbatches_calculator": (
        "init_num_microbatches_calculator",
        "unset_num_microbatches_calculator",
    ),
    "megatron.core.optimizer": ("OptimizerConfig", "get_megatron_optimizer"),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer",),
    "megatron.core.optimizer_param_scheduler": (
        "OptimizerParamScheduler",
        "get_canonical_lr_for_logging",
    ),
    "megatron.core.parallel_state": (
        "destroy_model_parallel",
        "get_context_parallel_group",
        "get_context_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_expert_data_parallel_world_size",
        "get_expert_model_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_last_rank",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "initialize_model_parallel",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
    ),
    "megatron.core.pipeline_parallel": ("get_forward_backward_func",),
    "megatron.core.rerun_state_machine": (
        "RerunMode.DISABLED",
        "RerunStateMachine.validate_result",
        "destroy_rerun_state_machine",
    ),
    "megatron.core.tensor_parallel": ("get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"),
    "megatron.core.tensor_parallel.layers": ("set_tensor_model_parallel_attributes",),
    "megatron.core.tensor_parallel.mappings": (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
    ),
    "megatron.core.tokenizers": ("MegatronTokenizer.from_pretrained",),
    "megatron.core.transformer.attention": ("SelfAttention",),
    "megatron.core.transformer.cuda_graphs": ("TECudaGraphHelper",),
    "megatron.core.transformer.dot_product_attention": ("DotProductAttention",),
    "megatron.core.transformer.enums": ("AttnBackend",),
    "megatron.core.transformer.identity_op": ("IdentityOp",),
    "megatron.core.transformer.module": ("Float16Module",),
    "megatron.core.transformer.moe.moe_utils": ("",),
    "megatron.core.transformer.spec_utils": ("ModuleSpec",),
    "megatron.core.transformer.torch_norm": ("WrappedTorchNorm",),
    "megatron.core.transformer.transformer_config": (
        "MLATransformerConfig",
        "TransformerConfig",
    ),
    "megatron.core.transformer.transformer_layer": ("TransformerLayer",),
    "megatron.core.transformer.utils": ("make_sharded_tensors_for_checkpoint",),
    "megatron.core.utils": ("get_batch_on_this_cp_rank",),
}

# Private by their name, or replaced by hpctrain: any release may rename or rewrite them.
_PRIVATE: Mapping[str, tuple[str, ...]] = {
    # compiled; a checkout has to build them first
    "megatron.core.datasets.helpers": ("build_sample_idx",),
    "megatron.core.datasets.gpt_dataset": ("GPTDataset.build_low_level_dataset",),
    "megatron.core.dist_checkpointing.serialization": ("save_config",),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": (
        "FileSystemWriterAsync.finish",
        "FileSystemWriterAsync.prepare_write_data",
        "FileSystemWriterAsync.retrieve_write_results",
    ),
    "megatron.core.extensions.transformer_engine": ("HAVE_TE", "TELinear.__init__"),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "DistributedOptimizer.get_parameter_state_dp_reshardable",
        "DistributedOptimizer.load_parameter_state_from_dp_reshardable",
        "DistributedOptimizer.load_state_dict",
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        "DistributedOptimizer.sharded_state_dict",
    ),
    "megatron.core.rerun_state_machine": ("_set_rerun_state_machine",),
    "megatron.core.tensor_parallel.layers": ("reduce_from_tensor_model_parallel_region",),
    "megatron.core.tensor_parallel.random": (
        "_get_cuda_rng_state",
        "_set_cuda_rng_state",
        "convert_cuda_rng_state",
        "is_graph_safe_cuda_rng_tracker",
    ),
    "megatron.core.transformer.dot_product_attention": ("DotProductAttention.forward",),
    "megatron.core.transformer.multi_latent_attention": ("Linear", "TELinear"),
    "megatron.core.transformer.torch_norm": ("WrappedTorchNorm.__new__",),
    "megatron.core.transformer.transformer_layer": (
        "TransformerLayer._forward_attention",
        "TransformerLayer._forward_pre_mlp_layernorm",
    ),
}

# Attributes that only instances have: module, class, attributes that its `__init__` assigns.
_ASSIGNED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "FileSystemWriterAsync",
        ("checkpoint_dir", "results_queue", "write_buckets"),
    ),
    (
        "megatron.core.dist_checkpointing.strategies.torch",
        "TorchDistSaveShardedStrategy",
        ("thread_count", "use_cached_ckpt_structure", "validated_cache_reuse"),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer",
        ("buckets", "grad_data", "numel", "numel_unpadded"),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucket",
        ("grad_data", "numel_unpadded"),
    ),
    (
        "megatron.core.models.common.embeddings.rotary_pos_embedding",
        "RotaryEmbedding",
        ("inv_freq",),
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer",
        ("buffers", "gbuf_ranges", "model_param_group_index_map"),
    ),
    (
        "megatron.core.transformer.dot_product_attention",
        "DotProductAttention",
        ("hidden_size_per_partition", "num_attention_heads_per_partition", "scale_mask_softmax"),
    ),
)


def names_of_all_versions() -> Iterator[CoreName]:
    """Yield every name that hpctrain uses with each supported version."""
    for private, table in ((False, _PUBLIC), (True, _PRIVATE)):
        for module, paths in table.items():
            yield from (CoreName(module, path, private) for path in paths)
    for module, owner, attributes in _ASSIGNED:
        yield from (CoreName(module, owner, True, attribute) for attribute in attributes)


# -- Checking them -------------------------------------------------------------------------------


_MOST_NAMES = 5
_HINT = f"containers with {tested_numbers()} are fine, too; see docs/engines.md"


def library_findings() -> LibraryFindings:
    """Find why the installed megatron-core cannot train, and what to warn about.

    Imports megatron-core, unless its version is refused anyway.
    """
    version = software.megatron_core()
    if version is None:
        message = f"megatron-core is not installed: {_install_command()}"
        return LibraryFindings((LibraryProblem(message, _HINT),))
    remarks, problem = check_core(version)
    if problem is not None:
        return LibraryFindings((problem,))
    row = row_of(version)
    missing = missing_names((*names_of_all_versions(), *row.names))
    if not missing:
        return LibraryFindings(remarks=remarks)
    more = len(missing) - _MOST_NAMES
    listed = "; ".join(missing[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
    message = f"megatron-core {version} lacks what hpctrain uses: {listed}"
    hint = f"{_install_command()}; {_HINT}"
    return LibraryFindings((LibraryProblem(message, hint),), remarks)


def check_core(version: str) -> tuple[tuple[str, ...], LibraryProblem | None]:
    """Return warnings about a version of megatron-core, and why it is refused (None: it is not)."""
    oldest = SUPPORTED[0].number
    if release_numbers(version) < release_numbers(oldest):
        message = f"megatron-core {version} is older than {oldest}, the oldest supported version"
        return (), LibraryProblem(f"{message}: {_install_command()}", _HINT)
    if is_tested(version):
        return (), None
    row = row_of(version)
    remark = (
        f"megatron-core {version} is not tested with hpctrain, {tested_numbers()} are: it is used "
        f"as {row.number}; compare the losses of a known run first"
    )
    return (remark,), None


def missing_names(names: Iterable[CoreName]) -> list[str]:
    """Import the modules of `names`; return what is missing, in words, each module once."""
    try:
        megatron_on_cpu.import_core()
    except Exception as error:  # importing may raise anything
        return [f"megatron.core cannot be imported ({_in_one_line(error)})"]
    missing = []
    for name in names:
        try:
            found: Any = importlib.import_module(name.module)
            for word in name.path.split(".") if name.path else ():
                found = getattr(found, word)
        except AttributeError:
            missing.append(f"no {name}")
            continue
        except Exception as error:
            missing.append(f"{name.module} cannot be imported ({_in_one_line(error)})")
            continue
        # the code of a function has the names of attributes that it assigns (Python's data model,
        # `co_names`)
        if name.attribute and name.attribute not in found.__init__.__code__.co_names:
            missing.append(f"no {name}")
    return list(dict.fromkeys(missing))


def _install_command() -> str:
    """Return the command that installs the newest tested version for this Python."""
    python = tuple(map(int, platform.python_version_tuple()[:2]))
    usable = [row for row in SUPPORTED if row.oldest_python <= python]
    return f"`pip install megatron-core=={usable[-1].number}`"


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
