"""A language model of two layers on made-up text, trained by the SFTTrainer of TRL."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def main():
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    words = {f"w{number}": number for number in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w0",
        pad_token="w0",
    )
    starts = torch.randint(0, 64, (320, 1), generator=torch.Generator().manual_seed(1))
    rows = ((starts + torch.arange(32)) % 64).tolist()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
