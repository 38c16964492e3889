"""The word-level tokenizer of the reference model, in classes that transformers loads by itself."""

from collections.abc import Sequence
from typing import cast

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ray_cluster.models.discriminators import PromptIds
from ray_cluster.quality.captions import caption_words

START, END, PAD, UNKNOWN = "<start>", "<end>", "<pad>", "<unknown>"
MAX_TOKENS = 32
# spellings that mean the same word
_SPELLINGS = {"grey": "gray", "centre": "center", "middle": "center"}


def vocabulary() -> dict[str, int]:
    """Token ids: the four special tokens, then the words of the grammar."""
    return {word: index for index, word in enumerate([PAD, START, END, UNKNOWN, *caption_words()])}


def tokenise(tokenizer: PreTrainedTokenizerFast, captions: Sequence[str]) -> Tensor:
    """Token ids [B, 32] as the pipelines make them: padded, cut at the end."""
    batch = tokenizer(
        list(captions),
        padding="max_length",
        max_length=MAX_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    return cast(Tensor, batch["input_ids"])


def build_prompt_ids() -> PromptIds:
    """The same tokenizer for a discriminator."""
    core = Tokenizer.from_str(build_tokenizer().backend_tokenizer.to_str())
    return PromptIds(core, MAX_TOKENS, vocabulary()[PAD])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: lower case, words only, one token for all unknown words."""
    words = vocabulary()
    core = Tokenizer(models.WordLevel(vocab=words, unk_token=UNKNOWN))
    core.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[^a-z]+"), " "),
            *(normalizers.Replace(Regex(rf"\b{old}\b"), new) for old, new in _SPELLINGS.items()),
        ]
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, words[START]), (END, words[END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=MAX_TOKENS,
        padding_side="right",
        truncation_side="right",
    )
