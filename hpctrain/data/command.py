"""`data`: making datasets, looking into them, and checking them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.base.units import ByteSize, Duration
from hpctrain.page.options import ProfileName, json_option
from hpctrain.page.output import json_out, say
from hpctrain.page.text import Whole, facts, or_dash, paragraph

if TYPE_CHECKING:
    from hpctrain.records.datasets import DatasetSidecar

PATH = click.Path(path_type=Path)
FORMATS = ("tokens", "packed", "examples", "images", "arrays")


@click.group()
def data() -> None:
    """Make datasets for training, look into them, and check them.

    \b
    Examples:
      hpctrain data prepare --output data/text books/ --vocab-size 32000
      hpctrain data show data/text
      hpctrain data verify data/text
    """


class Quantity(click.ParamType[Any]):
    """A `size` such as 4MB, or a `time` such as 30min or 04:00:00."""

    def __init__(self, name: str, accept: Callable[[object], object]) -> None:
        self.name, self._accept = name, accept

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        try:
            return self._accept(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE, TIME = Quantity("size", ByteSize.accept), Quantity("time", Duration.accept)


@data.command(short_help="Make a dataset from text, conversations or images")
@click.argument("inputs", nargs=-1, type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="Prefix of the dataset's files.")
@click.option("--format", type=click.Choice(FORMATS), help="Default: tokens; of digits: arrays.")
@click.option(
    "--builtin",
    is_flag=False,
    flag_value="stdlib",
    type=click.Choice(("stdlib", "digits")),
    help="Source text of Python's standard library, or scikit-learn's handwritten digits.",
)
@click.option("--suffix", multiple=True, help="Suffix of files to take from directories.")
@click.option("--max-bytes", type=SIZE, help="Stop reading after so much text, such as 4MB.")
@click.option("--vocab-size", type=click.IntRange(2), help="Including the end of a document.")
@click.option("--tokenizer", type=PATH, help="A tokenizer.json or a directory; train none.")
@click.option("--tokenizer-output", type=PATH, help="Where to write a trained tokenizer.")
@click.option("--field", help="Field of JSONL lines that is the text.")
@click.option("--seq", type=click.IntRange(2), help="packed, examples: tokens of a sample.")
@click.option("--chat-template", type=PATH, help="packed: instead of the tokenizer's own.")
@click.option("--classes", metavar="A,B,...", help="examples: names of labels by number.")
@click.option("--workers", type=click.IntRange(1), help="Processes at once (of each element).")
@click.option("--shard-size", type=SIZE, help="Text that a process takes at a time.")
@click.option("--slurm", is_flag=True, help="Make the shards by a job array.")
@click.option("--profile", "-p", type=ProfileName(), help="--slurm: cluster profile.")
@click.option("--jobs", type=click.IntRange(1), help="--slurm: elements of the array. Default: 8.")
@click.option("--partition", help="--slurm: default: that of the profile.")
@click.option("--time", type=TIME, help="--slurm: time limit of an element.")
@click.option("--force", is_flag=True, help="Replace another dataset of that name.")
@json_option
def prepare(output: Path, as_json: bool, **options: Any) -> None:
    """Make a dataset from text, conversations or images; does nothing if it is there already.

    \b
    tokens    text or JSONL, for pretraining; a tokenizer is trained or given
    packed    JSONL of conversations, for fine-tuning: only answers are learned
    examples  JSONL of texts with a label
    images    a directory with one directory per class: looked at, and listed
    arrays    small pictures: digits, or two files in MNIST's format

    Finished shards are kept after a failure: the same command continues.

    \b
    Examples:
      hpctrain data prepare --builtin --vocab-size 1024 --output data/text
      hpctrain data prepare -o data/books books/ --suffix .txt --vocab-size 32000
      hpctrain data prepare -o data/web web/ --tokenizer llama/ --slurm -p a100x64
      hpctrain data prepare -o sft a.jsonl --format packed --tokenizer t --seq 512
      hpctrain data prepare --builtin digits --output data/digits
    """
    on_slurm = {name: options.pop(name) for name in ("profile", "jobs", "partition", "time")}
    if options.pop("slurm"):
        report = _prepared_on_slurm(_request(output, options), **on_slurm)
    else:
        from hpctrain.base.errors import UsageError
        from hpctrain.job.datasets import prepare_dataset

        given = [name for name, value in on_slurm.items() if value is not None]
        if given:
            raise UsageError(f"--{given[0]} goes with --slurm")
        report = prepare_dataset(_request(output, options))
    if as_json:
        json_out("dataset", report)
    elif hasattr(report.dataset, "npz_bytes"):
        say(f"Dataset   {output}.npz, {report.dataset.samples:,} samples")
    else:
        _tell_tokens(output, report.dataset)


def _tell_tokens(output: Path, dataset: DatasetSidecar) -> None:
    """Print what was made, and what `data.split` has to be where documents are few."""
    from hpctrain.records.shares import parts_without_documents, split_hint
    from hpctrain.spec.data import DataSpec

    count = f"{dataset.documents:,} documents, {dataset.tokens:,} tokens"
    say(f"Dataset   {output}.bin and .idx: {count}")
    split = DataSpec.model_fields["split"].default
    if empty := parts_without_documents(split, dataset.documents):
        few = f"too few documents for {empty[0]} with `data.split: {split}`, the default"
        for line in paragraph(f"{few}; {split_hint(dataset.documents)}", "Note      ", hang=10):
            say(line)


def _request(output: Path, options: dict[str, Any]) -> Any:
    from hpctrain.records.datasets import DatasetRequest

    renamed = {"suffix": "suffixes", "seq": "seq_length", "shard_size": "shard_bytes"}
    given = {renamed.get(name, name): value for name, value in options.items() if value is not None}
    given["classes"] = tuple(filter(None, given.get("classes", "").split(",")))
    return DatasetRequest(output=output, **given)


def _prepared_on_slurm(
    request: Any,
    profile: str | None,
    jobs: int | None,
    partition: str | None,
    time: Duration | None,
) -> Any:
    from hpctrain.base.errors import UsageError
    from hpctrain.data.on_slurm import ArrayRequest, prepare_on_slurm
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec.loader import load_named_profile

    if profile is None:
        raise UsageError("--slurm needs --profile, which defines how to request nodes")
    site = load_named_profile(profile).document
    array = ArrayRequest(site, jobs or 8, partition, time)
    return prepare_on_slurm(request, array, SlurmClient(), lambda line: click.echo(line, err=True))


@data.command(short_help="Show what is in a dataset")
@click.argument("prefix", type=PATH)
@json_option
def show(prefix: Path, as_json: bool) -> None:
    """Show the contents of a dataset.

    \b
    Examples:
      hpctrain data show data/text
    """
    from hpctrain.job.datasets import describe_dataset

    found = describe_dataset(prefix)
    if as_json:
        json_out("dataset", found)
        return
    fields = found.model_dump(exclude={"sidecar"})
    arrays = {f"array {name}": shape for name, shape in fields.pop("arrays", {}).items()}
    for name, value in (*fields.items(), *arrays.items()):
        shown = f"{value:,}" if isinstance(value, int) else or_dash(value)
        click.echo("\n".join(facts((name, Whole(shown)), margin=11)))


@data.command(short_help="Read a whole dataset, and compare its digests")
@click.argument("prefix", type=PATH)
@json_option
def verify(prefix: Path, as_json: bool) -> None:
    """Read a whole dataset, and compare it with the digests from when it was made.

    \b
    Examples:
      hpctrain data verify data/text
    """
    from hpctrain.job.datasets import verify_dataset

    verified = verify_dataset(prefix)
    if as_json:
        json_out("verified", verified)
    else:
        say(f"Good      {', '.join(verified.files)}")
