"""Counts the tokens of prompts as a model does, without the model or the libraries that run it.

A replica packs the tokenizers of its model; gateways, which may be on other nodes, count with them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence

from tokenizers import Tokenizer

from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import PromptTokenizer

_DIGEST_CHARS = 16


def packed(tokenizer_json: str, max_tokens: int) -> PromptTokenizer:
    """Return a tokenizer of the ``tokenizers`` library to be sent.

    Args:
        max_tokens: most tokens of a prompt, without those that mark its ends.
    """
    content = json.loads(tokenizer_json)
    # as the pipeline's last call has left them
    content["truncation"] = content["padding"] = None
    return PromptTokenizer(zlib.compress(json.dumps(content).encode()), max_tokens)


def digest_of(tokenizers: Sequence[PromptTokenizer]) -> str:
    """Return a digest that is equal for tokenizers that count alike; empty for none."""
    if not tokenizers:
        return ""
    hashed = hashlib.sha256()
    for one in tokenizers:
        hashed.update(f"{one.max_tokens} {len(one.content)} ".encode() + one.content)
    return hashed.hexdigest()[:_DIGEST_CHARS]


def too_long(param: str, num_tokens: int, max_tokens: int) -> InvalidRequest:
    """Return the error for a prompt with too many tokens."""
    return InvalidRequest(
        f"The parameter {param!r} has {num_tokens} tokens; this model reads at most {max_tokens}, "
        "some 4 characters each. Shorten it.",
        param=param,
        code="string_above_max_length",
    )


class PromptCounter:
    """Counts with unpacked tokenizers, in any thread; building it takes a fraction of a second."""

    def __init__(self, tokenizers: Sequence[PromptTokenizer]) -> None:
        self._tokenizers = [
            (Tokenizer.from_str(zlib.decompress(one.content).decode()), one.max_tokens)
            for one in tokenizers
        ]

    def check(self, text: str, param: str) -> None:
        """Refuse a text that a tokenizer makes too many tokens of.

        Raises:
            InvalidRequest: with the numbers.
        """
        for tokenizer, max_tokens in self._tokenizers:
            marks = tokenizer.num_special_tokens_to_add(False)
            num_tokens = len(tokenizer.encode(text).ids) - marks
            if num_tokens > max_tokens:
                raise too_long(param, num_tokens, max_tokens)
