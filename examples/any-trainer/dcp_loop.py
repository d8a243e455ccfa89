"""A classifier of made-up points, trained by plain PyTorch with torch.distributed.checkpoint."""

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS, SAVE_EVERY, BATCH = 60, 10, 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    points = torch.randn(320, 16)
    labels = (points[:, :4].sum(1) > 0).long()
    layers = torch.nn.Linear(16, 64), torch.nn.Linear(64, 2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if arguments.resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=arguments.resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = state["step"]
    while step < STEPS:
        # which samples a rank takes follows from the step alone
        order = torch.randperm(320, generator=torch.Generator().manual_seed(step))
        mine = order[dist.get_rank() * BATCH :][:BATCH]
        loss = torch.nn.functional.cross_entropy(model(points[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        sums = torch.stack([loss.detach(), torch.tensor(float(len(signals)))])
        dist.all_reduce(sums)  # the same on all ranks
        mean, stop = sums[0].item() / dist.get_world_size(), sums[1].item() > 0
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean!r}", flush=True)
        if stop or step % SAVE_EVERY == 0 or step == STEPS:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            dcp.save(state, checkpoint_id=arguments.output / f"step-{step}")
        if stop:
            break
    del model  # before its process group: PyTorch 2.13 may wait for ever the other way round
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
