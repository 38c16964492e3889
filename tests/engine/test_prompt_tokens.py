"""A gateway counts the tokens of any text as the model's own tokenizers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, T5Tokenizer

from ray_cluster.errors import InvalidRequest
from ray_cluster.models.prompt_tokens import PromptCounter, digest_of, packed
from recipes.networks.tokenizer import build_tokenizer
from tests.engine.conftest import Zoo
from tests.fakes import image_request

WORDS = [
    "a red circle",
    "RED",
    "\U0001f642",
    "e\u0301\u00e9",
    "\u6f22\u5b57",
    "\u05e2\u05d1",
    "\x85",
]
MARKS = ["<|endoftext|>", "</s>", "<start>", "<pad>", "<extra_id_0>", " \t\n\u2003", ""]
TEXTS = st.text(max_size=80) | st.lists(
    st.sampled_from([*WORDS, *MARKS]) | st.text(max_size=6), max_size=40
).map("".join)


def clip_tokenizer() -> CLIPTokenizer:
    """As of a folder with ``vocab.json`` and ``merges.txt``, and no ``tokenizer.json``."""
    letters = sorted(ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("c", "i"), ("a", "b</w>")]
    words = [*letters, *(f"{one}</w>" for one in letters), *(a + b for a, b in merges)]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    vocab = {word: index for index, word in enumerate([*words, *marks])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -5.0), ("\u2581", -2.0), ("\u2581red", -1.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=[*pieces, *letters], extra_ids=10)


@pytest.mark.parametrize("build", [build_tokenizer, clip_tokenizer, t5_tokenizer])
def test_every_text_has_as_many_tokens_as_the_model_reads(build: Callable[[], Any]) -> None:
    tokenizer = build()
    # what a pipeline's calls leave behind must not count
    tokenizer(["a red circle"], padding="max_length", max_length=7, truncation=True)
    counter = PromptCounter([packed(tokenizer.backend_tokenizer.to_str(), -1)])
    marks = tokenizer.num_special_tokens_to_add()

    @given(TEXTS)
    def counts_alike(text: str) -> None:
        count = len(tokenizer(text, truncation=False, verbose=False).input_ids) - marks
        # no text has so few
        with pytest.raises(InvalidRequest, match=rf" has {count} tokens; "):
            counter.check(text, "prompt")

    counts_alike()


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd35", "flux"])
def test_the_longest_prompt_that_a_model_reads_passes_and_no_longer_one(
    zoo: Zoo, name: str
) -> None:
    encoder = zoo.model(name).encoder
    counter = PromptCounter(encoder.tokenizers)
    longest = "red " * encoder.max_prompt_tokens
    counter.check(longest, "prompt")
    with pytest.raises(InvalidRequest) as refused:
        counter.check(f"{longest} red", "prompt")
    with pytest.raises(InvalidRequest) as by_replica:
        encoder.encode([image_request(prompt=f"{longest} red")])
    assert refused.value.args == by_replica.value.args
    # SDXL's two are one here
    assert len(encoder.tokenizers) == 1


def test_a_digest_tells_tokenizers_and_limits_apart() -> None:
    one = packed(build_tokenizer().backend_tokenizer.to_str(), 30)
    others = [(), (one,), (replace(one, max_tokens=31),), (one, one)]
    others.append((packed(clip_tokenizer().backend_tokenizer.to_str(), 30),))
    assert len({digest_of(each) for each in others}) == len(others)
    again = packed(build_tokenizer().backend_tokenizer.to_str(), 30)
    assert digest_of([again]) == digest_of([one])
