"""Who is odd: tables of stacks as faulthandler writes them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import hpctrain
from hpctrain.judge.odd_stacks import (
    NO_STACK,
    OTHER_WRITERS,
    OWN_WRITER,
    WAITS,
    main_stack,
    odd_ranks,
    places,
    ranges,
)

PACKAGE = Path(hpctrain.__file__).parents[1]
SITE = "/env/lib/python3.11/site-packages"
LOOP = (
    '  File "/src/hpctrain/train/loop.py", line 57 in one_step\n'
    '  File "/src/hpctrain/train/loop.py", line 49 in run\n'
    '  File "/src/hpctrain/train/entry.py", line 170 in _train\n'
    '  File "/src/hpctrain/train/__main__.py", line 20 in <module>\n'
    '  File "<frozen runpy>", line 88 in _run_code\n'
    '  File "<frozen runpy>", line 198 in _run_module_as_main\n'
)


def dump(*innermost: str, more: str = LOOP, thread: str = "Current thread") -> str:
    """One thread; `innermost` are `path:line function`, paths below site-packages."""
    frames = ""
    for word in innermost:
        place, _, function = word.rpartition(" ")
        path, _, line = place.rpartition(":")
        path = path if path.startswith("/") else f"{SITE}/{path}"
        frames += f'  File "{path}", line {line} in {function}\n'
    return f"{thread} 0x00007fd8aea05b80 (most recent call first):\n{frames}{more}"


LOGGED = "torch/distributed/c10d_logger.py:83 wrapper"
ALL_REDUCE = dump("torch/distributed/distributed_c10d.py:3252 all_reduce", LOGGED)
BARRIER = dump("torch/distributed/distributed_c10d.py:5356 barrier", LOGGED)
RECV = dump(
    "megatron/core/pipeline_parallel/p2p_communication.py:371 _communicate",
    "megatron/core/pipeline_parallel/p2p_communication.py:410 recv_forward",
    "megatron/core/pipeline_parallel/schedules.py:2000 forward_backward_pipelining",
)
RECV_BACKWARD = dump(
    "megatron/core/pipeline_parallel/p2p_communication.py:371 _communicate",
    "megatron/core/pipeline_parallel/p2p_communication.py:450 recv_backward",
    "megatron/core/pipeline_parallel/schedules.py:2100 forward_backward_pipelining",
)
GRADIENTS = dump(
    "megatron/core/distributed/param_and_grad_buffer.py:500 finish_grad_sync",
    "megatron/core/distributed/distributed_data_parallel.py:480 finish_grad_sync",
)
AGREEMENT = dump("/src/hpctrain/train/step_agreement.py:90 result")
BACKWARD = dump(
    "torch/autograd/graph.py:825 _engine_run_backward", "torch/autograd/__init__.py:347 backward"
)
SYNCHRONIZE = dump("torch/cuda/__init__.py:1040 synchronize")
LOSS = dump("/src/hpctrain/train/engine.py:120 mean_loss")
SLEEP = dump("/software/ann/hooks.py:12 on_step")
READ = dump("/src/hpctrain/train/data.py:88 __getitem__")
READ_ELSEWHERE = dump("/src/hpctrain/train/tokens.py:31 _map")
IMPORT = dump(
    "torch/nn/modules/fold.py:11 <module>",
    more='  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed\n',
)
COMPUTE = dump(
    "megatron/core/tensor_parallel/layers.py:900 forward",
    "megatron/core/transformer/mlp.py:160 forward",
    "megatron/core/pipeline_parallel/schedules.py:420 forward_step",
)
SAVER = "/src/hpctrain/train/saving/saver.py"
STILL_WRITES = dump(f"{SAVER}:160 _agree_or_rest", f"{SAVER}:150 _wait_for_own_writer")
OTHERS = dump(f"{SAVER}:160 _agree_or_rest", f"{SAVER}:153 _wait_for_other_writers")
OTHERS_AGREE = dump(
    "/src/hpctrain/train/step_agreement.py:90 result",
    "/src/hpctrain/train/step_agreement.py:100 worst_writer",
    f"{SAVER}:158 _agree_or_rest",
    f"{SAVER}:153 _wait_for_other_writers",
)
PUBLISHER = dump(f"{SAVER}:160 _agree_or_rest", f"{SAVER}:156 _wait")
TIMES = dump("/src/hpctrain/train/times.py:150 _receive")
NODES = {rank: f"n{rank // 2}" for rank in range(64)}


def odd(*stacks: str, world_size: int | None = None) -> list[int]:
    given = dict(enumerate(stacks))
    found = odd_ranks(given, NODES, len(stacks) if world_size is None else world_size)
    assert [o.node for o in found] == [NODES[o.rank] for o in found]
    return [o.rank for o in found]


@pytest.mark.parametrize(
    ("name", "stacks", "expected"),
    [
        ("one sleeps in user code", [*[ALL_REDUCE] * 3, SLEEP], [3]),
        ("one of two sleeps", [ALL_REDUCE, SLEEP], [1]),
        ("one reads data, the others agree", [*[AGREEMENT] * 5, READ, AGREEMENT], [5]),
        ("two read, at different places", [BARRIER] * 6 + [READ, READ_ELSEWHERE], [6, 7]),
        ("all wait in the same place", [ALL_REDUCE] * 8, []),
        ("all wait, one of them elsewhere", [*[ALL_REDUCE] * 7, BARRIER], []),
        ("stages wait for each other", [RECV, RECV, RECV_BACKWARD, GRADIENTS], []),
        ("the first stage sleeps", [SLEEP, RECV, RECV, RECV], [0]),
        ("a stage sleeps, its peer reduces", [RECV_BACKWARD, GRADIENTS, SLEEP, RECV], [2]),
        ("few wait in recv, most in backward", [*[BACKWARD] * 6, RECV, RECV], []),
        ("GPUs: most at the loss, one sleeps", [*[LOSS] * 7, SLEEP], [7]),
        ("GPUs: most at the loss, few wait", [*[LOSS] * 6, ALL_REDUCE, ALL_REDUCE], []),
        ("GPUs: most at the loss, one waits, one sleeps", [*[LOSS] * 6, RECV, SLEEP], [7]),
        ("GPUs: all synchronize but one", [*[SYNCHRONIZE] * 3, READ], [3]),
        ("half at the loss, half elsewhere", [LOSS, LOSS, READ, SLEEP], []),
        ("all compute somewhere", [LOSS, READ, SLEEP, READ_ELSEWHERE], []),
        ("all import", [IMPORT] * 4, []),
        ("one does not answer", [ALL_REDUCE, ALL_REDUCE, "", ALL_REDUCE], [2]),
        ("a node of two does not answer", [ALL_REDUCE, ALL_REDUCE, "", ""], [2, 3]),
        ("most do not answer", [ALL_REDUCE, "", "", ""], []),
        ("nobody answers", ["", ""], []),
        ("one sleeps, one does not answer", [*[RECV] * 4, SLEEP, ""], [4, 5]),
        ("one computes for ever", [*[ALL_REDUCE] * 3, COMPUTE], [3]),
        ("all write", [STILL_WRITES] * 4, []),
        ("one still writes", [OTHERS, OTHERS_AGREE, STILL_WRITES, OTHERS], [2]),
        ("one of two still writes", [OTHERS_AGREE, STILL_WRITES], [1]),
        ("most still write", [OTHERS, STILL_WRITES, STILL_WRITES], []),
        ("all wait for the publisher, at two places", [*[PUBLISHER] * 3, AGREEMENT], []),
        ("one still writes, one does not answer", [*[OTHERS] * 3, STILL_WRITES, ""], [3, 4]),
        ("nothing at all", [], []),
    ],
)
def test_who_is_odd(name: str, stacks: list[str], expected: list[int]) -> None:
    assert odd(*stacks) == expected, name


@pytest.mark.parametrize(
    "text",
    [
        *[ALL_REDUCE, BARRIER, RECV, RECV_BACKWARD, GRADIENTS, AGREEMENT, BACKWARD],
        *[SYNCHRONIZE, STILL_WRITES, TIMES],
        dump("torch/distributed/rendezvous.py:180 _create_c10d_store"),
        dump("torch/cuda/streams.py:100 synchronize"),
    ],
)
def test_places_where_ranks_wait(text: str) -> None:
    stack = main_stack(text)
    assert stack is not None and stack.waits


@pytest.mark.parametrize(
    "text",
    [
        *[LOSS, SLEEP, READ, IMPORT, COMPUTE],
        dump("torch/cuda/__init__.py:300 _lazy_init"),
        dump("torch/distributed/checkpoint/filesystem.py:300 _write_item"),
        dump("/src/hpctrain/train/saving/saver.py:120 _plan"),
        dump("/software/nottorch/distributed/distributed_c10d.py:1 all_reduce"),
    ],
)
def test_places_where_they_do_not(text: str) -> None:
    stack = main_stack(text)
    assert stack is not None and not stack.waits


def test_a_rank_without_a_file_counts_if_the_number_of_ranks_is_known() -> None:
    assert odd(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, world_size=4) == [3]
    assert odd(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, world_size=0) == []


def test_lines_of_one_function_are_one_place() -> None:
    """In one loop, ranks that wait are at many lines."""
    at = [dump(f"/src/hpctrain/train/engine.py:{line} mean_loss") for line in range(120, 126)]
    assert odd(*at, SLEEP) == [6]


def test_where_it_is_and_on_which_node() -> None:
    found = odd_ranks({0: ALL_REDUCE, 1: ALL_REDUCE, 2: SLEEP, 3: ""}, {2: "n7"}, 4)
    assert [(o.rank, o.node) for o in found] == [(2, "n7"), (3, "")]
    assert found[0].where.startswith("on_step (ann/hooks.py:12) < one_step (hpctrain/train/loop.py")
    assert found[1].where == NO_STACK


def thread(*innermost: str, current: bool = False) -> str:
    bootstrap = (
        '  File "/py/lib/python3.11/threading.py", line 982 in run\n'
        '  File "/py/lib/python3.11/threading.py", line 1045 in _bootstrap_inner\n'
        '  File "/py/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
    )
    heading = "Current thread" if current else "Thread"
    return dump(*innermost, more=bootstrap, thread=heading) + "\n"


@pytest.mark.parametrize(
    ("text", "function"),
    [
        (ALL_REDUCE, "all_reduce"),
        (thread("/a/b.py:1 worker") + ALL_REDUCE, "all_reduce"),
        # The signal came to another thread than the main one.
        (thread("/a/b.py:1 v", current=True) + dump("/a.py:2 m", thread="Thread"), "m"),
        (thread("/a/b.py:1 w") + thread("/a/b.py:1 v", current=True), "v"),
        # C++ runs hooks of gradients in threads that `threading` knows nothing of.
        (
            dump("/a/b.py:1 hook", more="", thread="Thread") + "\n" + BACKWARD,
            "_engine_run_backward",
        ),
        # Python 3.14 prints the names of threads.
        (ALL_REDUCE.replace("b80 (", "b80 [python3] ("), "all_reduce"),
        ("rank=0 node=n0 pid=1 epoch=1\n" + ALL_REDUCE, "all_reduce"),
        (dump("<string>:1 <lambda>", "/x y/z.py:7 Cls.method"), "<lambda>"),
    ],
)
def test_the_main_thread(text: str, function: str) -> None:
    stack = main_stack(text)
    assert stack is not None
    assert stack.frames[0].function == function


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank=0 node=n0 pid=1 epoch=1\n",
        "Current thread 0x00007fd8 (most recent call first):\n  <no Python frame>\n",
        '  File "/a.py", line 1 in lonely\n',
        "\x00\xff noise",
    ],
)
def test_no_stack(text: str) -> None:
    assert main_stack(text) is None


def test_places_in_words() -> None:
    lines = places({0: ALL_REDUCE, 1: SLEEP, 2: ALL_REDUCE, 3: ALL_REDUCE, 4: ""})
    assert [line.partition(" < ")[0] for line in lines] == [
        "3 ranks (0,2-3): all_reduce (torch/distributed/distributed_c10d.py:3252)",
        "1 rank (1): on_step (ann/hooks.py:12)",
        f"1 rank (4): {NO_STACK}",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0,2-3,9"), ([5, 6], "5-6")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


# -- names that other code may change ---------------------------------------------------------


def _functions(path: Path) -> set[str]:
    """All functions and methods that a file, or the files of a directory, define."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text()) for file in files]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


def _source(path: str) -> Path:
    """A file below the package, or below where torch and megatron-core are installed."""
    root = path.partition("/")[0]
    if root == "hpctrain":
        return PACKAGE / path
    found = importlib.util.find_spec(root)  # does not import it
    assert found is not None and found.submodule_search_locations, root
    return Path(found.submodule_search_locations[0]).parent / path


@pytest.mark.parametrize(("path", "names"), WAITS)
def test_places_where_ranks_wait_exist(path: str, names: frozenset[str] | None) -> None:
    """Ranks that wait are recognised by the names of functions: a rename there needs one here."""
    source = _source(path)
    assert source.exists(), source
    assert _functions(source) >= (names or frozenset()), f"{source} defines other functions"


def _constants(name: str) -> dict[str, object]:
    """Collect the values that files of the trainer give to a constant, by path below the clone."""
    found: dict[str, object] = {}
    for path in sorted((PACKAGE / "hpctrain/train").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                found[path.relative_to(PACKAGE).as_posix()] = ast.literal_eval(node.value)
    return found


def test_the_trainer_names_the_same_functions_that_wait() -> None:
    expected = {path: names for path, names in WAITS if path.startswith("hpctrain/")}
    given = _constants("WAITS_FOR_RANKS")
    assert {
        path: None if names is None else frozenset(names)  # type: ignore[call-overload]
        for path, names in given.items()
    } == expected


@pytest.mark.parametrize(
    ("constant", "place"),
    [("WAITS_FOR_OWN_WRITER", OWN_WRITER), ("WAITS_FOR_OTHER_WRITERS", OTHER_WRITERS)],
)
def test_places_where_ranks_wait_for_writers_exist(constant: str, place: tuple[str, str]) -> None:
    path, function = place
    assert function in _functions(_source(path))
    assert _constants(constant) == {path: function}


# -- directories of the package ---------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    [
        "/src/hpctrain",
        "/ann/hpctrain/hpctrain",
        "/ann/main/hpctrain",
        "/ann/a b/hpctrain",
        "/env/lib/python3.11/site-packages/hpctrain",
        "/hpctrain/.venv/lib/python3.11/site-packages/hpctrain",
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_frames_of_the_trainer_wherever_it_lies(package: str, recorded: bool) -> None:
    text = dump(f"{package}/train/step_agreement.py:90 result")
    stack = main_stack(text, package if recorded else "")
    assert stack is not None and stack.waits
    assert stack.place[0] == "hpctrain/train/step_agreement.py:result"


def test_files_beside_the_package_are_not_its_own() -> None:
    """A clone whose directory is called as the package: only what is recorded tells them apart."""
    package = "/ann/hpctrain/hpctrain"
    text = dump("/ann/hpctrain/train/step_agreement.py:90 result")
    stack = main_stack(text, package)
    assert stack is not None and not stack.waits
    assert stack.place[0] == "train/step_agreement.py:result"
    assert str(main_stack(dump("/ann/hpctrain/tests/unit/mine.py:3 work"), package)).startswith(
        "work (unit/mine.py:3)"
    )
