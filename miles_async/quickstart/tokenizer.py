"""The quickstart's tokenizer: one token per character, in the files every tokenizer library reads.

Writes `tokenizer.json` and `tokenizer_config.json`; owns nothing. Always true: ids are fixed by `VOCABULARY`, and a text
of its characters survives encode and decode unchanged. Characters outside it become `<unk>`, never silence.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

__all__ = ["EOS_ID", "MAX_TOKENS", "PAD_ID", "UNK_ID", "VOCABULARY", "make_tokenizer", "save_tokenizer"]

SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY: tuple[str, ...] = (*SPECIAL, *"0123456789+-*()= ")
"""Token of each id, in order of the ids."""

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
MAX_TOKENS = 128
"""Longest sequence (prompt and response) the tiny model is configured for."""


def make_tokenizer() -> Tokenizer:
    """A BPE tokenizer without merges: every character is a token."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Write both tokenizer files into an existing directory."""
    make_tokenizer().save(str(directory / "tokenizer.json"))
    # Written by hand: the class name that transformers 5 saves is unknown to transformers 4, this one both know.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
