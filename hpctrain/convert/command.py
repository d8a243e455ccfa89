"""Command `convert`: weights from one form into another."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import json_option
from hpctrain.page.output import json_out, say
from hpctrain.page.text import Whole, facts

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@json_option
def convert(source: Path, target: Path, as_json: bool) -> None:
    """Write the model of SOURCE to the new directory TARGET, in another form.

    \b
    SOURCE                                     TARGET
    Hugging Face directory                     megatron-core: `model.pretrained`
    what `convert` has made for megatron-core  Hugging Face directory
    RUN/checkpoints/iter_N of a run            Hugging Face directory, LoRA merged

    Weights keep their type (bf16 or fp32). Needs no GPU; megatron-core's are converted one after
    the other in the memory of one, from checkpoints of any layout. A conversion that was killed
    goes on with the files that it has finished, which are verified by their digests at the end.

    \b
    Examples:
      hpctrain convert models/llama-7b models/llama-7b-megatron
      hpctrain convert runs/llama7b-7f3a/checkpoints/iter_0002000 models/tuned
    """
    from hpctrain.convert.of_spec import convert_weights

    report = convert_weights(source, target)
    if as_json:
        json_out("conversion", report)
        return
    merged = ", thin matrices merged" if report.merged_lora else ""
    made = f"{report.parameters:,} parameters in {report.dtype}{merged}"
    named = ((report.form, Whole(target)), (report.model_type, Whole(made)))
    say("\n".join(facts(*named, margin=14)))
