"""The target architectures we know: one table, and the tensors that each must bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class Architecture:
    """How one decoder-only family differs from the common Llama shape."""

    model_type: str
    query_key_norm: bool = False
    """RMS norms over each head's queries and keys."""
    always_qkv_bias: bool = False
    """q, k and v (not o) have biases whatever the config says."""
    optional_biases: bool = False
    """`attention_bias` in the config adds biases to q, k, v and o."""
    optional_mlp_bias: bool = False
    """`mlp_bias` in the config adds biases to the MLP."""
    head_dim_required: bool = False
    """The head size is the config's alone, never hidden size / heads."""
    kv_heads_required: bool = False
    """Without `num_key_value_heads` the family does not fall back to one per query head."""


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        "qwen3", query_key_norm=True, optional_biases=True, head_dim_required=True, kv_heads_required=True
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", always_qkv_bias=True, kv_heads_required=True),
    "LlamaForCausalLM": Architecture("llama", optional_biases=True, optional_mlp_bias=True),
}
"""Name in config.json -> what we need to know. A new family of this shape is one line."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes from which every tensor's shape follows."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    attention_bias: bool = False
    mlp_bias: bool = False


def expected_tensors(architecture: Architecture, shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the checkpoint must hold; `lm_head.weight` included."""
    expected: dict[str, tuple[int, ...]] = {
        EMBEDDING: (shape.vocab, shape.hidden),
        FINAL_NORM: (shape.hidden,),
        HEAD: (shape.vocab, shape.hidden),
    }
    layer = dict(_layer_tensors(architecture, shape))
    for index in range(shape.layers):
        expected |= {f"model.layers.{index}.{name}": dims for name, dims in layer.items()}
    return expected


def _layer_tensors(architecture: Architecture, shape: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    biased = architecture.optional_biases and shape.attention_bias
    mlp_biased = architecture.optional_mlp_bias and shape.mlp_bias
    for name, rows, columns, bias in (
        ("self_attn.q_proj", queries, shape.hidden, biased or architecture.always_qkv_bias),
        ("self_attn.k_proj", keys, shape.hidden, biased or architecture.always_qkv_bias),
        ("self_attn.v_proj", keys, shape.hidden, biased or architecture.always_qkv_bias),
        ("self_attn.o_proj", shape.hidden, queries, biased),
        (
            "mlp.gate_proj",
            shape.intermediate,
            shape.hidden,
            mlp_biased,
        ),
        ("mlp.up_proj", shape.intermediate, shape.hidden, mlp_biased),
        (
            "mlp.down_proj",
            shape.hidden,
            shape.intermediate,
            mlp_biased,
        ),
    ):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    if architecture.query_key_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    yield "input_layernorm.weight", (shape.hidden,)
    yield "post_attention_layernorm.weight", (shape.hidden,)
