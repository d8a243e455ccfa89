"""A classifier of made-up points, trained by Lightning."""

import argparse
import os
import signal

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

STEPS, SAVE_EVERY, BATCH, BATCHES_PER_EPOCH = 60, 10, 8, 20


class Batches:
    """Batches of made-up points. Lightning saves their state: a resume goes on with the next."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks, self.taken = rank, ranks, 0

    def __len__(self):
        return BATCHES_PER_EPOCH

    def __iter__(self):
        for _ in range(BATCHES_PER_EPOCH - self.taken % BATCHES_PER_EPOCH):
            generator = torch.Generator().manual_seed(self.taken * self.ranks + self.rank)
            self.taken += 1
            points = torch.randn(BATCH, 16, generator=generator)
            yield points, (points[:, :4].sum(1) > 0).long()

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Points(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 2))

    def train_dataloader(self):
        return Batches(self.global_rank, self.trainer.world_size)

    def training_step(self, batch, _):
        points, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveOnSignal(Callback):
    """Save and leave after the step in which a rank has heard TERM. Lightning itself does not."""

    def __init__(self, directory):
        self.directory, self.signals = directory, []

    def on_train_start(self, *_):
        # in place of Lightning's handler, in which ranks wait for each other wherever they are
        signal.signal(signal.SIGTERM, lambda number, _: self.signals.append(number))

    def on_train_batch_end(self, trainer, *_):
        if trainer.strategy.reduce_boolean_decision(bool(self.signals), all=False):
            name = f"epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(os.path.join(self.directory, name))
            trainer.should_stop = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=nodes,
        strategy="ddp",
        max_steps=STEPS,
        log_every_n_steps=1,
        logger=CSVLogger(arguments.output, name=None, version="", flush_logs_every_n_steps=1),
        callbacks=[
            SaveOnSignal(arguments.output),
            ModelCheckpoint(arguments.output, every_n_train_steps=SAVE_EVERY, save_top_k=-1),
        ],
    )
    trainer.fit(Points(), ckpt_path=arguments.resume)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # PyTorch 2.13 may abort an exit with threads of gloo


if __name__ == "__main__":
    main()
