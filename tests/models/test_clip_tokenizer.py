"""The tokenizer that ships for checkpoints in one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from ray_cluster.models.checkpoints.clip_tokenizer import END, MAX_TOKENS, tokenizer_files

# of OpenAI's own tokenizer (openai/CLIP, clip.tokenize)
_KNOWN = {
    "a photo of a cat": [320, 1125, 539, 320, 2368],
    "a diagram": [320, 22697],
    "Hello, World!": [3306, 267, 1002, 256],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    folder: Path = tmp_path_factory.mktemp("clip")
    for name, text in tokenizer_files(END).items():
        (folder / name).write_text(text, encoding="utf-8")
    return CLIPTokenizer.from_pretrained(folder)


def test_it_has_clips_numbers(tokenizer: CLIPTokenizer) -> None:
    assert len(tokenizer) == 49408
    assert tokenizer.model_max_length == MAX_TOKENS
    for text, numbers in _KNOWN.items():
        assert tokenizer(text).input_ids == [49406, *numbers, 49407]


def test_prompts_are_filled_up_as_the_text_encoders_were_trained(tokenizer: CLIPTokenizer) -> None:
    padded = tokenizer("a cat", padding="max_length").input_ids
    assert padded == [49406, 320, 2368] + [49407] * 74
