"""A classifier of made-up points, trained by plain PyTorch and supervised with hpctrain.trainer."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hpctrain import trainer

STEPS, SAVE_EVERY, BATCH = 60, 10, 8


def main():
    run = trainer.start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    points = torch.randn(320, 16)
    labels = (points[:, :4].sum(1) > 0).long()
    layers = torch.nn.Linear(16, 64), torch.nn.Linear(64, 2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if run.resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=run.resume)
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
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        request = run.step(step, loss=mean.item())
        if request or step % SAVE_EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            with run.saving(step) as directory:
                dcp.save(state, checkpoint_id=directory)
        if request is trainer.Request.STOP:
            run.leave()
    run.finish()
    del model  # before its process group: PyTorch 2.13 may wait for ever the other way round
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
