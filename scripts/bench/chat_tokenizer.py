"""A chat model's tokenizer of bytes, on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.runtime.chat import Chat

TEMPLATE = (
    "{% if tools %}<s>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<e>\n{% endif %}"
    "{% for m in messages %}<s>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_chat(folder: Path, template: str = TEMPLATE, *, words: int = 0, special: Sequence[str] = ()) -> Chat:
    """A byte-level tokenizer without merges: a character outside ASCII is several tokens. `words`: ids in all, the further ones
    words that it never makes itself. `special`: further special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ("<s>", "<e>", "<tool_call>", "</tool_call>")
    known = [*marks, *alphabet, *special]
    known += [f"w{i}" for i in range(len(known), words)]
    bare = Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bare.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*marks[:2], *special)])
    bare.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks[2:]])
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<e>")
    made.chat_template = template
    made.save_pretrained(str(folder))
    return Chat(str(folder))
