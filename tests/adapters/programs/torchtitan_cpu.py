"""Start torchtitan's debug model on CPUs: what it reads of a GPU is replaced, its data made up.

Arguments: a directory for its output, then more words for torchtitan.train.
"""

import collections
import importlib
import json
import os
import pathlib
import runpy
import sys
import tempfile
import types

import torch
from tokenizers import Tokenizer, models
from torchtitan.tools import utils


class NoDevice:
    """What torchtitan asks a GPU for, of a machine without one."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_name(self, device):
        return "CPU"

    def get_device_properties(self, device):
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device):
        return collections.Counter()

    def current_device(self):
        return 0

    def reset_peak_memory_stats(self):
        pass

    def empty_cache(self):
        pass


def attention(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):
    """Stand in for FlexAttention, which has no backward on CPUs."""
    heads = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
    found = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return found.transpose(1, 2)


def main():
    utils.device_type, utils.device_module = "cpu", NoDevice()  # before others import them
    importlib.import_module("torchtitan.models.common.attention").FlexAttention.forward = attention
    torch.distributed.set_timeout = lambda *_: None  # newer than PyTorch 2.13
    assets = pathlib.Path(tempfile.mkdtemp())
    words = {f"w{number}": number for number in range(64)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    rows = [{"text": " ".join(f"w{(start + at) % 64}" for at in range(64))} for start in range(64)]
    data = assets / "tests/assets/c4_test"  # where its configuration looks for them
    data.mkdir(parents=True)
    (data / "data.json").write_text("\n".join(map(json.dumps, rows)))
    output = pathlib.Path(sys.argv[1])
    sys.argv[1:] = ["--module", "llama3", "--config", "llama3_debugmodel", *sys.argv[2:]]
    sys.argv += ["--hf_assets_path", str(assets), "--dump_folder", str(output.absolute())]
    os.chdir(assets)
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    main()
