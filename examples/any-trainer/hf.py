"""A language model of two layers on made-up text, trained by the Trainer of transformers."""

import signal

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Sentences(torch.utils.data.Dataset):
    """320 sequences that count upwards from a random token."""

    def __init__(self):
        starts = torch.randint(0, 64, (320, 1), generator=torch.Generator().manual_seed(1))
        self.tokens = (starts + torch.arange(32)) % 64

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class SaveOnSignal(TrainerCallback):
    """Save and leave after the step in which a rank has heard SIGTERM.

    Ranks agree on the step, unlike with `--enable_jit_checkpoint`.
    """

    def __init__(self):
        self.signals = []
        signal.signal(signal.SIGTERM, lambda number, _: self.signals.append(number))

    def on_step_end(self, args, state, control, **_):
        told = torch.tensor(float(len(self.signals)), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(told)
        if told > 0:
            control.should_save = control.should_training_stop = True


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.add_callback(SaveOnSignal())
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
