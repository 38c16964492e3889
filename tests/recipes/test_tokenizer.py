"""The tokenizer reloads as it was, and bears any prompt."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ray_cluster.quality.captions import caption_words
from recipes.export import SHAPES_SD
from recipes.networks.tokenizer import MAX_TOKENS, build_tokenizer, vocabulary

CAPTION = "a large red circle in the center on a black background"


@pytest.fixture(params=["saved", "exported"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    if request.param == "exported":
        return AutoTokenizer.from_pretrained(SHAPES_SD / "tokenizer")
    build_tokenizer().save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_it_reloads_with_the_same_ids(tokenizer) -> None:
    assert tokenizer(CAPTION).input_ids == build_tokenizer()(CAPTION).input_ids
    assert tokenizer.model_max_length == MAX_TOKENS
    assert tokenizer.get_vocab() == vocabulary()


def test_every_word_of_the_grammar_is_one_known_token(tokenizer) -> None:
    for word in caption_words():
        start, token, end = tokenizer(word).input_ids
        assert (start, end) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert token == vocabulary()[word]


def test_unknown_words_become_one_token(tokenizer) -> None:
    ids = tokenizer("a quokka circle").input_ids
    assert ids[2] == tokenizer.unk_token_id
    assert ids[3] == vocabulary()["circle"]


def test_case_punctuation_and_spelling_do_not_matter(tokenizer) -> None:
    plain = tokenizer("a red circle in the center on a gray background").input_ids
    written = tokenizer("A red circle, in the CENTRE; on a grey background!").input_ids
    assert written == plain


def test_long_prompts_are_cut_and_short_ones_padded_to_32_tokens(tokenizer) -> None:
    for prompt in ("", CAPTION, "very " * 100):
        batch = tokenizer(prompt, padding="max_length", max_length=MAX_TOKENS, truncation=True)
        assert len(batch.input_ids) == MAX_TOKENS
        assert batch.input_ids[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token_id in batch.input_ids
