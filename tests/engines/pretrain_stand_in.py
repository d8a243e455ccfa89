"""A stand-in for Megatron-LM's pretrain_gpt.py: it trains nothing.

It accepts its arguments by argparse, prints what training.py and checkpointing.py print (the lines
were copied from a real run), writes files named as `torch_dist` checkpoints have them, looks for
SIGTERM after each step on all ranks together, and leaves with the same codes. STAND_IN says what
else happens: `exit:CODE@STEP`, `raise@STEP`, `asked@STEP` (it goes on once it is asked to leave),
`until:FILE@STEP` (it goes on, slowly, once the file is there), `silent`, `torn@STEP`.
"""

import argparse
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist

asked = False


def ask(number: int, frame: object) -> None:
    global asked
    asked = True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("train-iters", "global-batch-size", "save-interval", "log-interval", "ckpt-step"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("eval-interval", "eval-iters", "num-layers", "hidden-size", "seed"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("save", "load", "ckpt-format", "lr", "tokenizer-type", "distributed-backend"):
        parser.add_argument(f"--{name}")
    for name in ("exit-signal-handler", "exit-on-missing-checkpoint", "mock-data"):
        parser.add_argument(f"--{name}", action="store_true")
    args, rest = parser.parse_known_args()
    unknown = [word for word in rest if word.startswith("--no-such")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def say(rank: int, text: str) -> None:
    if dist.get_rank() == rank:
        print(text, flush=True)


def now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")


def loss_of(step: int) -> float:
    return 4.0 / step


def save(args: argparse.Namespace, step: int, *, torn: bool) -> None:
    directory = Path(args.save, f"iter_{step:07d}")
    say(
        0, f"[{now()}] saving checkpoint at iteration {step:7d} to {args.save} in torch_dist format"
    )
    directory.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    for number in range(2):
        (directory / f"__{rank}_{number}.distcp").write_bytes(os.urandom(2000 + rank))
    dist.barrier()
    if rank == 0:
        for name in (".metadata", "common.pt") + (() if torn else ("metadata.json",)):
            (directory / name).write_text(f"{name} of {step}")
        Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(step))
        print(
            f"  [{now()}] successfully saved checkpoint from iteration {step:7d} to {args.save} "
            "[ t 1/1, p 1/1 ]",
            flush=True,
        )
    dist.barrier()


def load(args: argparse.Namespace) -> int:
    if not args.load:
        return 0
    directory = Path(args.load, f"iter_{args.ckpt_step:07d}")
    assert (directory / "metadata.json").is_file(), f"no checkpoint {directory}"
    tracker = Path(args.load, "latest_checkpointed_iteration.txt").read_text()
    assert int(tracker) == args.ckpt_step
    say(0, f" loading distributed checkpoint from {args.load} at iteration {args.ckpt_step}")
    return int(args.ckpt_step)


def log(args: argparse.Namespace, step: int, losses: list[float]) -> None:
    mean = sum(losses) / len(losses)
    say(
        dist.get_world_size() - 1,
        f" [{now()}] iteration {step:8d}/{args.train_iters:8d} |"
        f" consumed samples: {step * args.global_batch_size:12d} |"
        f" elapsed time per iteration (ms): {20.0:.1f} | learning rate: {1e-3 / step:.6E} |"
        f" global batch size: {args.global_batch_size:5d} | lm loss: {mean:.6E} |"
        f" loss scale: {1.0:.1f} | grad norm: {1.0 / step:.3f} |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |",
    )


def evaluate(args: argparse.Namespace, step: int) -> None:
    line = f" validation loss at iteration {step} | lm loss value: {loss_of(step) + 1:.6E} | "
    line += f"lm loss PPL: {9.9:.6E} | "
    for text in ("-" * len(line), line, "-" * len(line)):
        say(dist.get_world_size() - 1, text)


def train(args: argparse.Namespace, wish: str, start: int) -> None:
    kept: list[float] = []
    for step in range(start + 1, args.train_iters + 1):
        what, _, at = wish.rpartition("@")
        if what.startswith("until:") and step > int(at):
            time.sleep(0.3)
        kept.append(loss_of(step))
        log(args, step, kept)
        kept = kept if step == start + 1 else []  # as `is_first_iteration` does
        if args.eval_iters and step % args.eval_interval == 0:
            evaluate(args, step)
        if at == str(step):
            happens(args, what, step)
        if asked_anywhere():
            save(args, step, torn=False)
            say(0, "[exiting program after receiving SIGTERM.] datetime: ")
            sys.exit(0)
        if step % args.save_interval == 0 or step == args.train_iters:
            save(args, step, torn=wish == f"torn@{step}")


def asked_anywhere() -> bool:
    flags = torch.tensor([int(asked)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def happens(args: argparse.Namespace, what: str, step: int) -> None:
    if what.startswith("exit:"):
        save(args, step - 1, torn=False)
        sys.exit(int(what.removeprefix("exit:")))
    while what == "asked" and not asked_anywhere():
        time.sleep(0.05)
    while what.startswith("until:") and not Path(what.removeprefix("until:")).exists():
        time.sleep(0.05)
    if what == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


if __name__ == "__main__":
    given = parse()
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, ask)
    wanted = os.environ.get("STAND_IN", "")
    if wanted == "silent":
        sys.exit()
    train(given, wanted, load(given))
