"""Print the measures of the code base, one line each, and draw the rooms.

    python -m bench.house [--pictures] [--list] [DIRECTORY]

DIRECTORY is a checkout, this one if left out; `--list` also prints what the counts found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.house import counts, pictures
from bench.house.cost import dry_run_cost, loaded_modules
from bench.house.sources import installed, read_package
from bench.house.spec_walk import walk_of_spec

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("submitit", "click", "httpx", "jinja2", "rich", "pydantic")
PAGE = Path("docs/rooms.md")


def main(arguments: list[str]) -> None:
    """Print the measures; with `--pictures` write docs/rooms.md, too."""
    parser = argparse.ArgumentParser(prog="python -m bench.house")
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--pictures", action="store_true", help=f"write {PAGE} anew")
    parser.add_argument("--list", action="store_true", help="print what the counts found, too")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    sources = read_package(checkout / "hpctrain")

    engines = counts.engine_literals(sources)
    print(f"engine names outside their rooms: {len(engines)}")
    print(f"private functions used once: {counts.one_use_share(sources)} (goal: 15% at most)")
    for peer in PEERS:
        directory = installed(peer)
        if directory is not None:
            print(f"  {peer}: {counts.one_use_share(read_package(directory))}")
    modules = loaded_modules("hpctrain.job.submit", "hpctrain.supervise", checkout)
    print(f"modules of supervise that `import hpctrain.job.submit` loads: {len(modules)}")
    ours, peer_seconds = dry_run_cost(checkout)
    print(
        f"CPU of a dry run of examples/gpt175b.yaml: {ours:.2f} s, "
        f"{ours / peer_seconds:.1f} times importing click and pydantic ({peer_seconds:.2f} s)"
    )
    walk = walk_of_spec(sources)
    print(
        f"functions that receive the spec from submit to script: {len(walk.receivers)} "
        f"in {walk.files} files, and {len(walk.carried_to)} an object that holds it"
    )
    print(f"package: {counts.line_count(sources)} lines in {len(sources)} files")
    repeated = counts.repeated_classes(sources)
    print(f"names of more than one class: {len(repeated)}")
    mirrors, copies = counts.mirrored_classes(sources), counts.copied_fields(sources)
    print(f"pairs of classes that share five fields: {len(mirrors)}")
    print(f"lines that hand a field on under its own name: {len(copies)}")
    small = counts.small_modules_of_one(sources)
    print(f"modules of at most 150 lines that one other of their room imports: {len(small)}")
    short = counts.one_use_functions(sources, 5)
    print(f"private functions of at most five lines that one place calls: {len(short)}")
    print(f"public functions with a docstring: {counts.documented_share(sources)}")
    if options.list:
        lists = {
            "engine names": engines,
            "private functions used once": counts.one_use_functions(sources),
            "modules of supervise": modules,
            "functions that receive the spec": sorted(walk.receivers),
            "functions that receive an object that holds it": sorted(walk.carried_to),
            "pairs of classes that share five fields": mirrors,
            "modules of at most 150 lines that one other imports": small,
            "private functions of at most five lines that one place calls": short,
            "repeated classes": [f"{name}: {', '.join(at)}" for name, at in repeated.items()],
        }
        for title, found in lists.items():
            print(f"\n{title}:", *found, sep="\n  ")
    if options.pictures:
        (checkout / PAGE).write_text(pictures.page(sources))
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
