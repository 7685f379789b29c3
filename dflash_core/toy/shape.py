"""Shapes of the toy, and the untrained model of a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INITIAL_STD = 0.08
"""About 1 / sqrt(hidden size); with the usual 0.02 the first hundred steps are lost."""

Family = Literal["qwen3", "qwen2", "llama"]


@dataclass(frozen=True)
class ToyShape:
    """Sizes of a toy target. The default learns its texts; `TINY` is for tests of the machinery."""

    family: Family = "qwen3"
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    """Serving engines have attention kernels for 32, 64, 128 ...; qwen2 needs hidden_size / num_heads."""
    intermediate_size: int = 384
    vocab_size: int = 1024
    max_positions: int = 1024


TINY = ToyShape(num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=192)


def new_model(shape: ToyShape, *, eos_id: int, pad_id: int) -> PreTrainedModel:
    """A model with random weights (torch's global generator), without training state."""
    import transformers

    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
    config_class: Any = getattr(transformers, f"{names[shape.family]}Config")
    model_class: Any = getattr(transformers, f"{names[shape.family]}ForCausalLM")
    head_dim = {} if shape.family == "qwen2" else {"head_dim": shape.head_dim}
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_STD,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
        **head_dim,
    )
    model: PreTrainedModel = model_class(config)
    return model
