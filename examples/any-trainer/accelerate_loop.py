"""A classifier of made-up points, trained by a loop of one's own with accelerate."""

import argparse
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

STEPS, SAVE_EVERY, BATCH = 60, 10, 8


class Progress:
    """How far training is; its file is the last one that accelerate writes of a checkpoint."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    torch.set_num_threads(1)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # of samples: from seed and epoch
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    set_seed(1)
    points = torch.randn(320, 16)
    dataset = torch.utils.data.TensorDataset(points, (points[:, :4].sum(1) > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress, stop = Progress(), False
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state(str(arguments.resume))
    while progress.step < STEPS and not stop:
        loader.set_epoch(progress.step // len(loader))
        for points, labels in accelerator.skip_first_batches(loader, progress.step % len(loader)):
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            told = torch.tensor(float(len(signals)), device=accelerator.device)
            sums = accelerator.reduce(torch.stack([loss.detach(), told]))  # the same on all ranks
            mean, stop = sums[0].item() / accelerator.num_processes, sums[1].item() > 0
            accelerator.print(f"step {progress.step} loss {mean!r}", flush=True)
            if stop or progress.step % SAVE_EVERY == 0:
                accelerator.save_state(str(arguments.output / f"step_{progress.step}"))
            if stop or progress.step == STEPS:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
