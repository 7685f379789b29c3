"""RealignConfig: everything a realignment can be told; one field = one docstring = one flag.

Only pydantic and the standard library are imported here, so that `--help` answers at once. A field
that is None is automatic. How much to do (`generate`, `drafter`, `train`, `evaluate`) is filled in by
`pipelines.budget`, where to do it (`device`, `dtype`, `resources`) by `pipelines.placement`; a
docstring that says "unset" names its own rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Scalar = str | int | float | bool | None

LayerType = Literal["full_attention", "sliding_attention"]


class Section(BaseModel):
    """A table of the configuration file: unknown keys are refused and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def _idle(self, name: str, unless: str) -> None:
        """Refuse a value given for a field that nothing reads. Raises ValueError."""
        if getattr(self, name) != type(self).model_fields[name].default:
            raise ValueError(f"{name} has no effect without {unless}; give both or neither")


class GenerateSection(Section):
    """The target answers the training prompts."""

    num_prompts: int | None = Field(None, ge=1)
    """Training prompts answered, at most; auto on GPUs is all of them."""
    max_new_tokens: int | None = Field(None, ge=2)
    """Longest answer, in tokens."""
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    """Sampling temperature of the training answers; 0 is greedy."""
    thinking: Literal["default", "on", "off", "both"] = "default"
    """What the chat template is told of prompts that don't say themselves, the gate's too; a domain each."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sampled from the likeliest tokens that together reach this probability; 1 is all tokens."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What decodes: our own batching over transformers, or vLLM where it is installed."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens decoded together by one actor: answers under way x the longest that one can become."""
    shard_prompts: int | None = Field(None, ge=1)
    """Prompts per shard; a killed generation repeats one shard per actor at most."""


class SelectSection(Section):
    """Only the most valuable answers are trained on, if a fraction is given."""

    fraction: float | None = Field(None, gt=0.0, lt=1.0)
    """Share of the answers' tokens kept; unset: all, and nothing is scored."""
    by: Literal["draft", "random"] = "draft"
    """What makes an answer valuable: that the champion drafts it badly; random is the control."""
    anchors_per_answer: int = Field(32, ge=1)
    """Blocks drafted to score an answer, at most."""

    @model_validator(mode="after")
    def _all_in_use(self) -> SelectSection:
        if self.fraction is None:
            self._idle("by", "select.fraction")
            self._idle("anchors_per_answer", "select.fraction")
        return self


class ExtractSection(Section):
    """The target's hidden states become Arrow shards."""

    shard_tokens: int | None = Field(None, ge=1)
    """Tokens per shard, about; a killed extraction repeats one shard per actor at most."""
    batch_tokens: int = Field(4_096, ge=1)
    """Tokens of one forward pass, about; a longer sample passes alone."""
    chunk_tokens: int = Field(4_096, ge=1)
    """Tokens of a longer sample that pass at once; the rest follows through the KV cache."""
    storage: Literal["bf16", "compact"] = "bf16"
    """How features are kept: as they are, or in half the bytes (float8 with a scale per token and tap)."""
    last_hidden: bool = False
    """Keep the final hidden states too, from which the target's distribution can be computed again."""


class DrafterSection(Section):
    """The shape of a drafter that is trained from scratch; a champion keeps its own."""

    num_layers: int | None = Field(None, ge=1, le=64)
    """Decoder layers of the drafter."""
    block_size: int | None = Field(None, ge=2, le=128)
    """Tokens of one block: the last known token and the drafts after it."""
    target_layer_ids: tuple[int, ...] | None = Field(None, min_length=1)
    """Target layers that are tapped, counted from 0; unset: up to five, spread uniformly."""
    init: Literal["target", "random"] = "target"
    """Where a new drafter's layers come from: the target's own where shapes allow, or random."""
    sliding_window: int | None = Field(None, ge=1)
    """Window of the sliding layers, in tokens; unset: every layer sees everything."""
    layer_types: tuple[LayerType, ...] | None = Field(None, min_length=1)
    """Kind of each drafter layer; unset: all sliding with a sliding window, else all full."""

    @model_validator(mode="after")
    def _layers_agree(self) -> DrafterSection:
        if self.layer_types is None:
            return self
        if self.num_layers not in (None, len(self.layer_types)):
            raise ValueError(
                f"drafter.layer_types names {len(self.layer_types)} layers but drafter.num_layers is "
                f"{self.num_layers}; give one of them"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("drafter.layer_types has sliding layers; give drafter.sliding_window too")
        return self


class TrainSection(Section):
    """The drafter learns the target's answers (recipe: arXiv 2602.06036)."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps; excludes --train.epochs."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training answers; excludes --train.steps."""
    mode: Literal["full", "lora", "private", "scratch"] = "full"
    """From the champion all weights, low-rank updates, or feature projection and norms; or a new drafter."""
    lora_rank: int = Field(16, ge=1, le=1024)
    """Rank of the updates of mode lora."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices, AdamW what is left."""
    learning_rate: float = Field(6e-4, gt=0.0, le=1.0)
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Cosine to zero over all steps, or constant with a linear decay at the end."""
    warmup_fraction: float = Field(0.04, ge=0.0, le=1.0)
    """Share of the steps that warm the learning rate up."""
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)
    """Share of the steps that schedule wsd decays in."""
    patience: int | None = Field(None, ge=1)
    """Held-out measurements in a row without progress that end training early; unset: never."""
    clip_norm: float = Field(1.0, gt=0.0)
    """Largest norm of the gradient."""
    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    """Weight decay on matrices."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens of one optimizer step, over all workers."""
    micro_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward and backward, about, of each worker; unset: its whole share of the step."""
    anchors_per_sequence: int | None = Field(None, ge=1)
    """Blocks trained in each answer and epoch, at most."""
    anchors: Literal["uniform", "chain"] = "uniform"
    """Where blocks begin: anywhere in the answers, or where the drafter's own decoding would begin them."""
    chain_epochs: int = Field(4, ge=1)
    """Passes over the answers until those chains are walked anew."""
    loss: Literal["ce", "kl", "tv", "nla", "lk"] = "ce"
    """Loss of a draft slot: cross-entropy with the target's token, or a distance to its distribution."""
    weights: Literal["decay", "dpace"] = "decay"
    """How slots are weighed: decaying along the block, or by how likely decoding gets there (D-PACE)."""
    gamma: float | None = Field(None, gt=0.0)
    """Decay of the weights along the block; unset: 7, 5, 4 for block 16, 10, 8, and in between."""
    num_workers: int = Field(1, ge=1)
    """Ray Train workers, one GPU each where there are GPUs."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between held-out measurements and checkpoints; unset: an eighth of all, at most 100."""

    @model_validator(mode="after")
    def _one_duration(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("train.steps and train.epochs both say how long to train; give one of them")
        return self

    @model_validator(mode="after")
    def _all_in_use(self) -> TrainSection:
        if self.mode != "lora":
            self._idle("lora_rank", "train.mode lora")
        if self.anchors != "chain":
            self._idle("chain_epochs", "train.anchors chain")
        if self.schedule != "wsd":
            self._idle("decay_fraction", "train.schedule wsd")
        if self.weights != "decay":
            self._idle("gamma", "train.weights decay")
        return self


class EvaluateSection(Section):
    """Champion and candidate draft for the target on held-out prompts."""

    num_prompts: int | None = Field(None, ge=1)
    """Held-out prompts measured, at most."""
    held_out_share: float = Field(0.125, gt=0.0, le=0.5)
    """Share of the prompts that is never trained on, where no eval_prompts are given."""
    max_new_tokens: int | None = Field(None, ge=2)
    """Longest answer, in tokens."""
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    """Sampling temperature of the measured decoding; 0 is greedy and compared token for token."""


class GateSection(Section):
    """What a drafter must show to be promoted or certified."""

    min_tau: float | None = Field(None, ge=1.0)
    """Least mean acceptance length; excludes --gate.min-acceptance-rate; unset: 1.1 if neither is given."""
    min_acceptance_rate: float | None = Field(None, ge=0.0, le=1.0)
    """Least share of drafts accepted, (tau - 1) / (block_size - 1); unset: --gate.min-tau decides."""
    max_loss: float = Field(0.03, ge=0.0, lt=1.0)
    """Largest loss of tau against the champion, as a fraction, that still is not worse."""
    certify_loss: float = Field(0.05, ge=0.0, lt=1.0)
    """Largest loss of the champion's promised tau at which it is certified without training."""
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """Confidence of the intervals."""
    min_prompts: int = Field(8, ge=2)
    """Fewest measured prompts that the gate decides on."""
    num_resamples: int = Field(10_000, ge=100)
    """Bootstrap resamples over prompts."""

    @model_validator(mode="after")
    def _one_threshold(self) -> GateSection:
        if self.min_tau is not None and self.min_acceptance_rate is not None:
            raise ValueError(
                "gate.min_tau and gate.min_acceptance_rate say the same thing in two units; give one of them"
            )
        return self


class ResourcesSection(Section):
    """What the job takes of the machine or the cluster."""

    actors: int | None = Field(None, ge=1)
    """Ray actors that generate, extract and evaluate, at most; the cluster's autoscaler is asked for them."""
    min_actors: int = Field(1, ge=1)
    """Actors that must have started before work begins; the others join as there is room."""
    gpus_per_actor: float | None = Field(None, gt=0.0)
    """GPUs that each actor reserves; above 1 the target is spread over them."""
    cpus_per_actor: float | None = Field(None, gt=0.0)
    """CPUs that each actor reserves."""
    threads: int | None = Field(None, ge=1)
    """Torch threads of each actor and training worker."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> ResourcesSection:
        if self.actors is not None and self.min_actors > self.actors:
            raise ValueError(
                f"resources.min_actors is {self.min_actors} but resources.actors is {self.actors}; "
                "lower the one or raise the other"
            )
        return self


class RealignConfig(Section):
    """One realignment, whole."""

    target: str = Field(min_length=1)
    """Checkpoint to align with: a directory or a hub id."""
    prompts: tuple[str, ...] | None = Field(None, min_length=1)
    """Training prompts: a file, folder or hub id (see above); unset: the shipped set."""
    traces: tuple[str, ...] | None = Field(None, min_length=1)
    """Requests with the answers that this target gave in serving; unset: --prompts are answered now."""
    eval_prompts: tuple[str, ...] | None = Field(None, min_length=1)
    """Held-out prompts for the gate, as --prompts; unset: held out of --prompts, or the shipped set."""
    store: str = Field("dflash-store", min_length=1)
    """Where stage outputs are kept: a directory or an fsspec URI."""
    tracking_uri: str | None = Field(None, min_length=1, json_schema_extra={"metavar": "URI"})
    """MLflow tracking URI; unset: dflash-mlflow.db in the working directory."""
    model_name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[^/:]+$",
        json_schema_extra={"metavar": "NAME", "form": "a name without / and :, such as qwen3-8b"},
    )
    """Registered model's name; unset: derived from the target's architecture, shape and tokenizer."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of everything that is drawn."""
    mask_token_id: int | None = Field(None, ge=0)
    """Row of the target's embedding that stands for a draft to fill; unset: an unused one is chosen."""
    chat_template: Path | None = None
    """Chat template file; unset: the target's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto: on GPUs when the cluster has them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target; auto: bfloat16 on GPUs, float32 on CPUs."""
    ray_address: str | None = Field(None, min_length=1)
    """Ray cluster; unset: RAY_ADDRESS if set, else an own local Ray."""
    generate: GenerateSection = GenerateSection()
    select: SelectSection = SelectSection()
    extract: ExtractSection = ExtractSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    gate: GateSection = GateSection()
    resources: ResourcesSection = ResourcesSection()

    @field_validator("prompts", "traces", "eval_prompts", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return as_sources(value)

    @model_validator(mode="after")
    def _one_corpus(self) -> RealignConfig:
        if self.prompts is not None and self.traces is not None:
            raise ValueError("prompts and traces both say what to train on; give one of them")
        return self

    @property
    def from_scratch(self) -> bool:
        """Whether a new drafter is trained even when the registry has a champion to start from."""
        return self.train.mode == "scratch"

    def flat(self) -> dict[str, Scalar]:
        """Dotted name -> scalar, for MLflow's params: paths as text, lists joined by commas."""
        return dict(_flatten("", self))


def as_sources(value: Any) -> Any:
    """One source as a list of one: a file may say either."""
    return (str(value),) if isinstance(value, (str, Path)) else value


def _flatten(prefix: str, section: Section) -> Iterator[tuple[str, Scalar]]:
    for name, value in section:
        if isinstance(value, Section):
            yield from _flatten(f"{prefix}{name}.", value)
        elif isinstance(value, tuple):
            yield f"{prefix}{name}", ",".join(map(str, value))
        elif isinstance(value, Path):
            yield f"{prefix}{name}", str(value)
        else:
            yield f"{prefix}{name}", value
