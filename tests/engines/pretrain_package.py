"""Trains with the real `megatron.training` of PyPI's package, which has no pretrain_gpt.py.

Parser, checks, model, optimizer, loop, log lines, signal handler and checkpoints are Megatron-LM's
own; the loss, and reading one batch of mock data, are ours. The directory of the package must be
on the path.
"""

import importlib.util
import sys
import sysconfig
from functools import partial
from pathlib import Path

import torch

SITE = Path(sysconfig.get_path("purelib"), "megatron", "core", "datasets")


def use_compiled_helpers() -> None:
    """The package has them for another Python, and no Makefile: take those of megatron-core."""
    (path,) = SITE.glob("helpers_cpp.*.so")
    name = "megatron.core.datasets.helpers_cpp"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def datasets(args, sizes, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training.global_vars import get_tokenizer

    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="98,2,0",
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def loss_of(mask, output):
    mask = mask.view(-1).float()
    total, count = (output.view(-1).float() * mask).sum(), mask.sum().to(torch.int)
    report = torch.stack([total.detach(), count.float()])
    return total, count, {"lm loss": report}


def forward_step(iterator, model):
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    use_compiled_helpers()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    given = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    provider = partial(datasets, given)
    provider.is_distributed = True
    config = pretrain_cfg_container_from_args(given, gpt_config_from_args(given))
    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
