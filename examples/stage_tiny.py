"""What the tiny twins read: pictures, labelled texts, conversations, models with random weights.

    python examples/stage_tiny.py reviews distilbert    # data/tiny-reviews, models/tiny-distilbert

Everything is made here, from a fixed seed: nothing is downloaded. Belongs here: small stand-ins
for what a cluster stages. Does not belong here: preparing (see `hpctrain data prepare`).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOOD = ("great", "moving", "bright", "funny", "honest", "brilliant")
BAD = ("dull", "tired", "clumsy", "empty", "loud", "boring")
PLAIN = ("the", "film", "a", "story", "and", "its", "cast", "was", "with", "music", "scene", "very")
CLASSES = ("bad", "good")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURE_SIDE = 32
PICTURES_SHARE = 3  # every third: 599 pictures, so that one is a sixth of a point of accuracy
VALIDATION_SHARE = 5  # every fifth sample


def pictures(directory: Path) -> None:
    """scikit-learn's handwritten digits as PNG files: `train/CLASS/` and `val/CLASS/`."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(len(digits.target)):
        share = "val" if number % PICTURES_SHARE == 0 else "train"
        home = directory / share / f"digit-{digits.target[number]}"
        home.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((digits.images[number] * 15.9).astype("uint8"))
        picture.resize((PICTURE_SIDE, PICTURE_SIDE)).save(home / f"{number:04}.png")


def reviews(directory: Path) -> None:
    """Made-up film reviews: `train.jsonl` and `val.jsonl`, lines {"text": ..., "label": ...}."""
    lines = list(_reviews(300))
    _write_lines(directory / "val.jsonl", lines[::VALIDATION_SHARE])
    rest = [line for number, line in enumerate(lines) if number % VALIDATION_SHARE]
    _write_lines(directory / "train.jsonl", rest)


def chats(directory: Path) -> None:
    """Made-up conversations: `chats.jsonl`, lines {"messages": [...]}."""
    talks = []
    for number, line in enumerate(_reviews(200)):
        asked = {"role": "user", "content": f"say whether it is good: {line['text']}"}
        answer = {"role": "assistant", "content": f"review {number % 7} is {line['label']}"}
        talks.append({"messages": [asked, answer]})
    _write_lines(directory / "chats.jsonl", talks)


def distilbert(directory: Path) -> None:
    vocabulary = _word_tokenizer(directory)
    shape = dict(
        vocab_size=vocabulary, n_layers=2, dim=64, hidden_dim=256, n_heads=4, num_labels=2,
        max_position_embeddings=32,
    )  # fmt: skip
    _save("DistilBertForSequenceClassification", "DistilBertConfig", shape, directory)


def bert(directory: Path) -> None:
    vocabulary = _word_tokenizer(directory)
    shape = dict(
        vocab_size=vocabulary, num_hidden_layers=2, hidden_size=64, intermediate_size=256,
        num_attention_heads=4, num_labels=2, max_position_embeddings=32,
    )  # fmt: skip
    _save("BertForSequenceClassification", "BertConfig", shape, directory)


def llama(directory: Path) -> None:
    vocabulary = _chat_tokenizer(directory)
    shape = dict(
        vocab_size=vocabulary, num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    _save("LlamaForCausalLM", "LlamaConfig", shape, directory)


def _reviews(count: int) -> Iterator[dict[str, str]]:
    draws = random.Random(7)
    for number in range(count):
        label = number % 2
        words = draws.choices(PLAIN, k=6) + draws.choices((BAD, GOOD)[label], k=3)
        draws.shuffle(words)
        yield {"text": " ".join(words), "label": CLASSES[label]}


def _word_tokenizer(directory: Path) -> int:
    """Words as BERT's tokenizers cut them; returns their number."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PLAIN, *GOOD, *BAD]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    wrapped = _class("PreTrainedTokenizerFast")(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    wrapped.save_pretrained(str(directory))
    return len(words)


def _chat_tokenizer(directory: Path) -> int:
    """A byte-level tokenizer with a chat template; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([line["text"] for line in _reviews(200)], trainer)
    wrapped = _class("PreTrainedTokenizerFast")(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(str(directory))
    return int(inner.get_vocab_size())


def _class(name: str) -> Any:
    """A class of transformers, without the packages that it would import along."""
    from hpctrain.train.engines.models.transformers_library import class_named

    return class_named(name)


def _save(model: str, config: str, shape: dict[str, Any], directory: Path) -> None:
    import torch

    from hpctrain.convert.hugging_face_directory import write_model

    torch.manual_seed(1)
    write_model(_class(model)(_class(config)(**shape)), directory)


def _write_lines(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


DATA: dict[str, Callable[[Path], None]] = {
    made.__name__: made for made in (pictures, reviews, chats)
}
MODELS: dict[str, Callable[[Path], None]] = {
    made.__name__: made for made in (distilbert, bert, llama)
}


def main(names: list[str]) -> int:
    if not names or set(names) - set(DATA) - set(MODELS):
        known = " ".join([*DATA, *MODELS])
        print(f"usage: stage_tiny.py NAME..., out of: {known}", file=sys.stderr)
        return 2
    for name in names:
        home = Path("data" if name in DATA else "models") / f"tiny-{name}"
        (DATA.get(name) or MODELS[name])(home)
        print(f"made {home}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
