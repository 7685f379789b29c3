"""A byte-level tokenizer whose chat template behaves as reasoning models' do, and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.types import Checkpoint, TargetConfig

SPECIAL = ["<|end|>", "<|start|>", "<think>", "</think>"]
MAX_POSITIONS = 512
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THINKING = (
    "{% if tools %}<|start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}CALL {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Earlier answers lose their thinking; without thinking the prompt itself has an empty think block."""


def chat_tokenizer(template: str) -> Any:
    """One token a byte, and `SPECIAL`; <think> is a token of its own but no special one, as in Qwen3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL[:2])
    core.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL[2:]])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=template)


def checkpoint_of(tokenizer: Any) -> Checkpoint:
    """As much of a checkpoint as rendering looks at."""
    config = TargetConfig(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        hidden_size=8,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        vocab_size=len(tokenizer),
        max_positions=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        rope_parameters={},
        tie_word_embeddings=True,
        torch_dtype="float32",
        raw={},
    )
    return Checkpoint(
        path=Path("target"),
        config=config,
        fingerprint="0" * 64,
        family="toy",
        num_parameters=1,
        chat_template=tokenizer.chat_template,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=None,
        bos_id=None,
        num_tokenizer_ids=len(tokenizer),
    )
