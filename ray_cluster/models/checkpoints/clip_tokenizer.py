"""CLIP's tokenizer, which every Stable Diffusion reads prompts with and no checkpoint holds.

``clip_merges.txt.gz`` has the 48,894 merges of OpenAI's CLIP (MIT licence, (c) 2021 OpenAI), as
they come with OpenCLIP 3.3 (``bpe_simple_vocab_16e6.txt.gz``); the vocabulary follows from them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 49408
MAX_TOKENS = 77
START, END = "<|startoftext|>", "<|endoftext|>"
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
# bytes that are shown as themselves; the others are shown as characters from 256 on
_PLAIN = (range(ord("!"), ord("~") + 1), range(0xA1, 0xAD), range(0xAE, 0x100))
_END_OF_WORD = "</w>"


def tokenizer_files(pad: str) -> dict[str, str]:
    """Return the texts of a tokenizer's files by name.

    Args:
        pad: the token that fills prompts up: :data:`END`, or ``!``, number 0, with OpenCLIP.
    """
    merges = gzip.decompress(_MERGES.read_bytes()).decode()
    tokens = [*_bytes(), *(one + _END_OF_WORD for one in _bytes())]
    tokens += [line.replace(" ", "") for line in merges.splitlines()]
    numbers = {token: number for number, token in enumerate([*tokens, START, END])}
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "do_lower_case": True,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": pad,
    }
    return {
        "vocab.json": json.dumps(numbers, ensure_ascii=False),
        "merges.txt": f"#version: 0.2\n{merges}",
        "tokenizer_config.json": json.dumps(config),
    }


def _bytes() -> Iterator[str]:
    """Yield the characters that stand for bytes, in the order of their numbers."""
    plain = [byte for part in _PLAIN for byte in part]
    yield from map(chr, plain)
    yield from (chr(256 + index) for index in range(256 - len(plain)))
