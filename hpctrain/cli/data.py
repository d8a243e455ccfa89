"""`data`: making Megatron datasets from text, and looking into them."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import json_option
from hpctrain.cli.output import json_out, or_dash, say
from hpctrain.units import ByteSize

PATH = click.Path(path_type=Path)


@click.group()
def data() -> None:
    """Make Megatron datasets (.bin/.idx) from text, and look into them.

    \b
    Examples:
      hpctrain data prepare --output data/text books/ --vocab-size 32000
      hpctrain data show data/text
    """


class Size(click.ParamType[ByteSize]):
    """A byte size such as 4MB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> ByteSize:
        try:
            return ByteSize.accept(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@data.command()
@click.argument("inputs", nargs=-1, type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="Prefix of .bin and .idx.")
@click.option("--builtin", is_flag=True, help="Use the source text of Python's standard library.")
@click.option("--suffix", multiple=True, help="Suffix of files to take from directories.")
@click.option("--max-bytes", type=Size(), help="Stop reading after so much text, such as 4MB.")
@click.option("--vocab-size", type=click.IntRange(2), help="Including the end of a document.")
@click.option("--tokenizer", type=PATH, help="Use this tokenizer.json instead of training one.")
@click.option("--tokenizer-output", type=PATH, help="Where to write a trained tokenizer.")
@click.option("--force", is_flag=True, help="Replace another dataset of that name.")
@json_option
def prepare(
    inputs: tuple[Path, ...],
    output: Path,
    builtin: bool,
    suffix: tuple[str, ...],
    max_bytes: ByteSize | None,
    vocab_size: int | None,
    tokenizer: Path | None,
    tokenizer_output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train a tokenizer on text and write the dataset; does nothing if it is there already.

    \b
    Examples:
      hpctrain data prepare --builtin --vocab-size 1024 --output data/text
      hpctrain data prepare --output data/books books/ --suffix .txt --vocab-size 32000
    """
    from hpctrain.actions.data import DatasetRequest, prepare_dataset

    request = DatasetRequest(
        output=output,
        inputs=inputs,
        builtin=builtin,
        suffixes=suffix,
        max_bytes=None if max_bytes is None else int(max_bytes),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        tokenizer_output=tokenizer_output,
        force=force,
    )
    report = prepare_dataset(request)
    if as_json:
        json_out("dataset", report)
    else:
        say(f"Dataset   {output}.bin and .idx")


@data.command()
@click.argument("prefix", type=PATH)
@json_option
def show(prefix: Path, as_json: bool) -> None:
    """Show what a dataset holds.

    \b
    Examples:
      hpctrain data show data/text
    """
    from hpctrain.actions.data import describe_dataset

    found = describe_dataset(prefix)
    if as_json:
        json_out("dataset", found)
        return
    for name, value in found.model_dump(exclude={"sidecar"}).items():
        shown = f"{value:,}" if isinstance(value, int) else or_dash(value)
        click.echo(f"{name:10} {shown}")
