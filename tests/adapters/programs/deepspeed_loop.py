"""A classifier of made-up points, trained by DeepSpeed (ZeRO 1) on CPUs."""

import argparse
import os
import signal

import deepspeed
import torch
import torch.distributed as dist

STEPS, SAVE_EVERY, BATCH = 40, 10, 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    points = torch.randn(320, 16)
    labels = (points[:, :4].sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 2))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 5,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )
    if os.path.exists(os.path.join(arguments.output, "latest")):
        engine.load_checkpoint(arguments.output)
    while engine.global_steps < STEPS:
        order = torch.randperm(320, generator=torch.Generator().manual_seed(engine.global_steps))
        mine = order[dist.get_rank() * BATCH :][:BATCH]
        loss = torch.nn.functional.cross_entropy(engine(points[mine]), labels[mine])
        engine.backward(loss)
        engine.step()
        sums = torch.stack([loss.detach(), torch.tensor(float(len(signals)))])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"step {engine.global_steps} loss {sums[0].item() / 2!r}", flush=True)
        if sums[1] > 0 or engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(arguments.output)
        if sums[1] > 0:
            break
    dist.barrier()
    os._exit(0)  # threads of gloo may hold up an exit


if __name__ == "__main__":
    main()
