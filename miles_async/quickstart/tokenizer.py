"""A task's tokenizer: one token per character or mark, in the files every tokenizer library reads.

Writes `tokenizer.json` and `tokenizer_config.json`; owns nothing. Always true: ids are fixed by the task's vocabulary, and
a text of its tokens survives encode and decode unchanged. Characters outside it become `<unk>` and are never left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from miles_async.quickstart.task import SPECIAL, Task


def make_tokenizer(task: Task) -> Tokenizer:
    """A BPE tokenizer without merges: every character is a token, and marks of several characters stay whole."""
    ids = {token: index for index, token in enumerate(task.vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    marks = [token for token in task.vocabulary[len(SPECIAL) :] if len(token) > 1]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in marks])
    return tokenizer


def save_tokenizer(directory: Path, task: Task) -> None:
    """Write both tokenizer files into an existing directory."""
    make_tokenizer(task).save(str(directory / "tokenizer.json"))
    # Written by hand: the class name that transformers 5 saves is unknown to transformers 4, both know this one.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": task.max_tokens,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    if task.template:
        config["chat_template"] = task.template
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
