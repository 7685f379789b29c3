"""The toy's tokenizer, trained here on both styles so that a change of style keeps it."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from dflash_core.toy.arithmetic import LARGEST
from dflash_core.toy.question import STYLES
from dflash_core.toy.texts import conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
UNUSED = ("<|mask|>", "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>")
"""Never in any text: rows of the embedding that a drafter may take for its own."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TRAINING_TEXTS = 2000
_NUMBER_REPEATS = 400
"""How often the tokenizer sees every number, so that each becomes one token."""


def train_tokenizer(vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token a number; the same for every seed, since families go by tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, *UNUSED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [" ".join(map(str, range(LARGEST + 1)))] * _NUMBER_REPEATS
    texts = (
        f"system\nuser\n{prompt}\nassistant\n{answer}"
        for style in STYLES
        for _, prompt, answer in islice(conversations(style, seed=0), _TRAINING_TEXTS)
    )
    tokenizer.train_from_iterator(chain(numbers, texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *UNUSED],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
