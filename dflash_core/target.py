"""The loaded target model: embeddings, head, and a forward with taps at chosen decoder layers.

Taps are forward hooks, so that only the wanted layers' outputs are kept (transformers'
`output_hidden_states` keeps every layer), and a forward that needs no logits stops after the last
tapped layer. Layer id i means the *output of decoder layer i* (0-based), which transformers calls
`hidden_states[i + 1]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from dflash_core.errors import UserError
from dflash_core.transformers_bars import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the target gives back."""

    features: Tensor
    """[batch, tokens, taps x hidden], the taps side by side in the order asked for."""
    logits: Tensor
    """[batch, kept tokens, vocab]."""


class _StopForwardError(Exception):
    """Ends a forward after the last tapped layer; never leaves this module."""


class Target:
    """A causal LM with taps. Holds no state between calls: the KV cache belongs to the caller."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        # A checkpoint's penalties and filters would be mixed into every `generate`; the drafter must learn
        # what the target itself chooses, which is what verification compares with.
        self.model.generation_config = GenerationConfig()
        self.layers = decoder_layers(model)
        self.hidden_size = int(model.config.hidden_size)
        self._wanted: tuple[int, ...] = ()
        self._stop_after: int | None = None
        self._taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if index in self._wanted:
                self._taps[index] = output[0] if isinstance(output, tuple) else output
            if index == self._stop_after:
                raise _StopForwardError

        return keep

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_weight(self) -> Tensor:
        """[vocab, hidden]; shared with the drafter and never trained."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]; shared with the drafter and never trained."""
        return self.model.get_output_embeddings().weight

    def new_cache(self) -> DynamicCache:
        """An empty KV cache that can be cropped back after rejected drafts."""
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()
        return cache

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        *,
        layer_ids: Sequence[int] = (),
        cache: DynamicCache | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """Run the whole target over `input_ids` [batch, tokens] (int64), continuing `cache`.

        `logits_to_keep=n` gives the logits of the last n tokens only (0: all of them). Without
        `layer_ids` the features are of width 0.
        """
        with self._tapping(layer_ids):
            output = self.model(
                input_ids=input_ids,
                cache=cache,
                use_cache=cache is not None,
                logits_to_keep=logits_to_keep,
            )
            return TargetOutput(self._joined(layer_ids, input_ids), output.logits)

    @torch.inference_mode()
    def tap(
        self, input_ids: Tensor, layer_ids: Sequence[int], attention_mask: Tensor | None = None
    ) -> Tensor:
        """Features [batch, tokens, taps x hidden] only: the forward ends after the last tapped layer."""
        if not layer_ids:
            raise ValueError("name at least one layer to tap")
        with self._tapping(layer_ids, stop_after=max(layer_ids)):
            with contextlib.suppress(_StopForwardError):
                self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            return self._joined(layer_ids, input_ids)

    @contextlib.contextmanager
    def _tapping(self, layer_ids: Sequence[int], stop_after: int | None = None) -> Iterator[None]:
        self._wanted, self._stop_after = tuple(layer_ids), stop_after
        try:
            yield
        finally:
            self._wanted, self._stop_after, self._taps = (), None, {}

    def _joined(self, layer_ids: Sequence[int], input_ids: Tensor) -> Tensor:
        if not layer_ids:
            return torch.empty(*input_ids.shape, 0, dtype=self.dtype, device=self.device)
        return torch.cat([self._taps[i] for i in layer_ids], dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of any causal LM: its only ModuleList of `num_hidden_layers` entries."""
    count = model.config.num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__}: found {len(found)} lists of {count} decoder layers, expected one; "
            "use a Qwen3, Qwen2 or Llama target"
        )
    return found[0]


def crop_cache(cache: DynamicCache, length: int) -> None:
    """Forget everything past the first `length` tokens."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


def load_target(path: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Target:
    """Load a *validated* checkpoint directory (see `checkpoint.open_checkpoint`).

    Raises UserError where transformers still finds something that it cannot load.
    """
    try:
        with without_bars():
            model = _load(path, dtype)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers cannot load {path} ({reason}); mend the checkpoint") from error
    return Target(model.to(device))  # type: ignore[arg-type]  # transformers wraps nn.Module.to


def _load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
    )
    return model
