"""A tokenizer for models whose processors insist on one: a word for each token."""

from __future__ import annotations

from collections.abc import Mapping

from tiny import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def word_tokenizer(special: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """A tokenizer that has the ``special`` tokens by name, and `END` as token 2."""
    names = {token: name for name, token in special.items()} | {2: END}
    words = {names.get(token, f"w{token}"): token for token in range(VOCABULARY)}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=END,
        pad_token=END,
        unk_token="w0",
        additional_special_tokens=[*special],
    )
