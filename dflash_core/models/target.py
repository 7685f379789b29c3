"""The loaded target model: embeddings, head, and a forward with taps at chosen decoder layers.

Taps are forward hooks, so that only the wanted layers' outputs are kept (transformers'
`output_hidden_states` keeps every layer), and a forward that needs no logits stops after the last
tapped layer. Layer id i means the *output of decoder layer i* (0-based), which transformers calls
`hidden_states[i + 1]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from dflash_core.errors import UserError
from dflash_core.generation.row_cache import RowCache
from dflash_core.models.transformers_bars import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the target gives back."""

    features: Tensor
    """[batch, tokens, taps x hidden], the taps side by side in the order asked for."""
    logits: Tensor
    """[batch, kept tokens, vocab]."""


_MASK_ELEMENTS = 1 << 25
"""Of one chunk's attention mask: 168 MB on a CPU, a byte and an fp32 number each."""

KeepTap = Callable[[int, int, Tensor], None]
"""Takes a layer id, the position of the first token, and hidden states [batch, tokens, hidden]."""


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
        self._keep: Callable[[int, Tensor], None] | None = None
        self._stop_after: int | None = None
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._keep is not None:
                self._keep(index, output[0] if isinstance(output, tuple) else output)
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

    @cached_property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]; shared with the drafter and never trained. A copy where it lies elsewhere."""
        return self.model.get_output_embeddings().weight.to(self.device)

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
        taps: dict[int, Tensor] = {}
        with self._tapping(_keeper(taps, layer_ids)):
            output = self.model(
                input_ids=input_ids,
                cache=cache,
                use_cache=cache is not None,
                logits_to_keep=logits_to_keep,
            )
        return TargetOutput(self._side_by_side(taps, layer_ids, input_ids), output.logits.to(self.device))

    def new_rows(self) -> RowCache:
        """A cache without rows, for `forward_rows`."""
        return RowCache(self.num_layers, self.device)

    @torch.inference_mode()
    def forward_rows(
        self,
        input_ids: Tensor,
        cache: RowCache,
        *,
        layer_ids: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        """Run the target over `input_ids` [rows, tokens] (int64), each row continuing its own in `cache`.

        How many of the tokens stay in the cache is then told to `cache.keep`. Short rows are padded on the
        right, where nothing that counts attends to. Logits [rows, tokens, vocab], or with `logits_at`
        [rows] those of one token of each row [rows, 1, vocab].
        """
        positions = cache.begin(input_ids.shape[1])
        taps: dict[int, Tensor] = {}
        with self._tapping(_keeper(taps, layer_ids)):
            hidden = self.model.base_model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=self._row_mask(cache),
                cache=cache,
                use_cache=True,
            ).last_hidden_state
        if logits_at is not None:
            rows = torch.arange(len(hidden), device=hidden.device)
            hidden = hidden[rows, logits_at.to(hidden.device)][:, None]
        logits = self.model.get_output_embeddings()(hidden)
        return TargetOutput(self._side_by_side(taps, layer_ids, input_ids), logits.to(self.device))

    def _side_by_side(self, taps: dict[int, Tensor], layer_ids: Sequence[int], input_ids: Tensor) -> Tensor:
        # A model that is spread over devices leaves its layers' outputs on all of them.
        kept = [taps[index].to(self.device) for index in layer_ids]
        width = torch.empty(*input_ids.shape, 0, dtype=self.dtype, device=self.device)
        return torch.cat(kept, dim=-1) if kept else width

    def _row_mask(self, cache: RowCache) -> Any:
        """The attention mask as the model takes it: by kind of layer where some have a window."""
        # Over new rows alone plain causal attention is right, for which there are faster kernels.
        full = cache.visible() if any(cache.lengths) else None
        if "sliding_attention" not in (getattr(self.model.config, "layer_types", None) or ()):
            return full
        window = self.model.config.sliding_window
        return {"full_attention": full, "sliding_attention": cache.visible(window)}

    @torch.inference_mode()
    def tap(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        keep: KeepTap,
        *,
        chunk_tokens: int | None = None,
        last_hidden: bool = False,
    ) -> None:
        """Give `keep` the hidden states of `input_ids` [batch, tokens] as they appear; nothing else is kept.

        The forward ends after the last tapped layer, and makes no logits. last_hidden: it goes on to the
        end and gives the final hidden states, after the model's last norm, as layer `num_layers`.
        chunk_tokens: more tokens than that pass in chunks through a KV cache, so that activations and
        masks stay small (`chunks`); the result is the same up to rounding. A target whose rotary
        frequencies depend on the length passes whole, since in chunks it would compute something else.
        """
        if not layer_ids:
            raise ValueError("name at least one layer to tap")
        stop_after = None if last_hidden else max(layer_ids)
        length = input_ids.shape[1]
        if chunk_tokens is None or length <= chunk_tokens or self.rotates_by_length():
            ranges, cache = [(0, length)], None
        else:
            ranges = list(chunks(length, chunk_tokens))
            cache = self._cache_of(self.num_layers if last_hidden else max(layer_ids) + 1)
        for begin, end in ranges:

            def pass_on(index: int, hidden: Tensor, begin: int = begin) -> None:
                if index in layer_ids:
                    keep(index, begin, hidden)

            positions = torch.arange(begin, end, device=input_ids.device)[None]
            with self._tapping(pass_on, stop_after), contextlib.suppress(_StopForwardError):
                output = self.model.base_model(
                    input_ids=input_ids[:, begin:end],
                    position_ids=positions,
                    cache=cache,
                    use_cache=cache is not None,
                )
                keep(self.num_layers, begin, output.last_hidden_state)

    def _cache_of(self, num_layers: int) -> DynamicCache:
        """A cache for the first layers only: transformers sizes its masks by layers that have been run."""
        cache = DynamicCache(config=self.model.config)
        del cache.layers[num_layers:]
        return cache

    def rotates_by_length(self) -> bool:
        """Whether a token's rotary positions depend on how long the longest sequence beside it is."""
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        return rope.get("rope_type") in ("dynamic", "longrope")

    @contextlib.contextmanager
    def _tapping(self, keep: Callable[[int, Tensor], None], stop_after: int | None = None) -> Iterator[None]:
        self._keep, self._stop_after = keep, stop_after
        try:
            yield
        finally:
            self._keep, self._stop_after = None, None


def chunks(length: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover `length` tokens, none longer than `chunk_tokens`.

    A chunk after the first attends through a mask [chunk, all tokens up to its end], which would soon be
    larger than anything else; so chunks get shorter the further back they have to look.
    """
    begin = 0
    while begin < length:
        size = min(chunk_tokens, max(1, _MASK_ELEMENTS // (begin + chunk_tokens)))
        yield begin, min(begin + size, length)
        begin += size


def _keeper(taps: dict[int, Tensor], layer_ids: Sequence[int]) -> Callable[[int, Tensor], None]:
    """Puts the outputs of `layer_ids` into `taps`."""

    def keep(index: int, hidden: Tensor) -> None:
        if index in layer_ids:
            taps[index] = hidden

    return keep


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


def load_target(
    path: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, spread: bool = False
) -> Target:
    """Load a *validated* checkpoint directory (see `checkpoint.open_checkpoint`).

    spread: over all devices of the kind that this process sees, layer by layer (accelerate places them and
    moves hidden states from one to the next); what is asked of the target is gathered on the first.
    Raises UserError where transformers still finds something that it cannot load.
    """
    if spread and find_spec("accelerate") is None:
        raise UserError(
            "--resources.gpus-per-actor above 1 spreads the target over GPUs, which needs the package "
            "accelerate: pip install 'dflash-realign[spread]', on every node, or give each actor one GPU"
        )
    try:
        with without_bars():
            model = _load(path, dtype, "auto" if spread else None)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers cannot load {path} ({reason}); mend the checkpoint") from error
    if not spread:
        return Target(model.to(device))  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if device != "cpu" and places & {"cpu", "disk"}:
        raise UserError(
            f"{path} does not fit on the {torch.cuda.device_count()} GPUs of an actor; "
            "raise --resources.gpus-per-actor"
        )
    return Target(model)


def _load(path: Path, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        device_map=device_map,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
    )
    return model
