"""A program: puts arguments before a real Megatron-LM's own parser, checks and configuration.

`python megatron_lm_parser.py DIRECTORY` reads a JSON list of [world size, words] and answers with
a list of what became of them: the parsed values by name, with `config` for the fields of its
TransformerConfig, or `{"refused": why}`. DIRECTORY holds
the package `megatron` with `megatron.training`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        from hpctrain.train.engines.megatron_lm import cpu_stand_ins

        cpu_stand_ins.install()
        parse = prepared()
        answers = [answer(parse, world_size, words) for world_size, words in cases]
    json.dump(answers, sys.stdout)


def prepared() -> Any:
    """Megatron-LM's own functions, which ask for the kind of GPU."""
    import megatron.training
    import torch
    from megatron.training import arguments

    from hpctrain.train.engines.megatron_lm.program import DETERMINISTIC_VARIABLES

    assert str(megatron.training.__file__).startswith(sys.argv[1])
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    os.environ.update(DETERMINISTIC_VARIABLES, CUDA_DEVICE_MAX_CONNECTIONS="1")
    return arguments


def answer(parse: Any, world_size: int, words: list[str]) -> dict[str, Any]:
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parse.parse_args()
            parse.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
            config = configure(parse, args)
    except SystemExit as error:
        return {"refused": f"exit {error.code}: {said.getvalue()[-2000:]}"}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {**plain(args), "config": plain(config)}


def plain(values: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(values).items() if is_plain(value)}


def configure(parse: Any, args: Any) -> Any:
    """Build its TransformerConfig, without the fusion that asks for TransformerEngine first."""
    try:
        return parse.core_transformer_config_from_args(args)
    except ValueError as error:
        if "apply_rope_fusion" not in str(error):
            raise
        args.apply_rope_fusion = False
        return parse.core_transformer_config_from_args(args)


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


if __name__ == "__main__":
    main()
