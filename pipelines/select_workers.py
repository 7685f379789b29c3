"""What runs inside the actors of stage `select`: samples are scored, then picked."""

from __future__ import annotations

import time
from collections import Counter

import torch

from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import read_samples, write_samples
from dflash_core.corpus.selection import Rank, draft_score, random_score, spread_anchors
from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.token_batches import loss_mask
from dflash_core.models.drafter import Drafter, load_drafter
from dflash_core.models.drafter_config import check_fits
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.training.documents import Documents
from dflash_core.types import Checkpoint, Sample
from pipelines.placement import Placement, torch_dtype
from pipelines.select import scores_of
from pipelines.sharded import Row, ShardWorker
from pipelines.workers import start_target


class ScoreWorker(ShardWorker):
    """Says of every sample of a shard how much it is worth training on."""

    def __init__(
        self,
        guard: TargetGuard,
        workspace: Workspace,
        generated: Artifact,
        checkpoint: Checkpoint,
        placement: Placement,
        drafter: Artifact | None,
        *,
        seed: int,
        most_anchors: int,
        batch_tokens: int,
    ) -> None:
        """drafter: who drafts; None for random scores, which need no model."""
        self.guard, self.workspace, self.generated = guard, workspace, generated
        self.seed, self.most_anchors, self.batch_tokens = seed, most_anchors, batch_tokens
        self.drafter: Drafter | None = None
        if drafter is not None:
            self.target = start_target(checkpoint, placement)
            directory = drafter.local_dir() / "drafter"
            kind = torch_dtype(placement.dtype)
            self.drafter = load_drafter(directory, device=placement.device, dtype=kind)
            check_fits(self.drafter.config, checkpoint.config, where=str(directory))
            taps = self.drafter.config.target_layer_ids
            self.meta = FeatureMeta(checkpoint.fingerprint, taps, checkpoint.config.hidden_size)

    def work(self, task: Row) -> Row:
        """Task: {"name", "samples": file}. Leaves [[id, tokens, score], ...] in the samples' order."""
        began = time.perf_counter()
        samples = list(read_samples(self.generated.local(task["samples"])))
        scores = self._scores(samples)
        listed = [[s.id, len(s.input_ids), scores[s.id]] for s in samples]
        self.workspace.put_json(task["name"], listed)
        return {
            "samples": len(samples),
            "tokens": sum(tokens for _, tokens, _ in listed),
            "score": sum(scores.values()),
            "seconds": time.perf_counter() - began,
        }

    def _scores(self, samples: list[Sample]) -> dict[str, float]:
        if self.drafter is None:
            return {s.id: random_score(s.id, self.seed) for s in samples}
        by_length = sorted(samples, key=lambda s: (len(s.input_ids), s.id))
        batches = extract(
            self.target,
            by_length,
            self.meta,
            batch_tokens=self.batch_tokens,
            chunk_tokens=self.batch_tokens,
        )
        return {
            sample.id: draft_score(
                self.drafter,
                self.target.embedding_weight,
                self.target.head_weight,
                Documents(
                    ids=[torch.tensor(sample.input_ids)],
                    loss_masks=[mask := loss_mask(sample)],
                    anchors=[spread_anchors(mask, self.most_anchors)],
                    features=features,
                ),
            )
            for batch in batches
            for sample, features in batch.rows()
        }


class PickWorker(ShardWorker):
    """Writes the samples of a shard that are kept, and of every sample whether and why."""

    def __init__(
        self, guard: TargetGuard, workspace: Workspace, generated: Artifact, lowest: tuple[float, float]
    ) -> None:
        """lowest: score and tie of the least rank that is kept."""
        self.guard, self.workspace, self.generated = guard, workspace, generated
        self.lowest = Rank(*lowest)

    def work(self, task: Row) -> Row:
        """Task: {"name": a samples file, "scores": what ScoreWorker left for it}."""
        scores = {name: score for name, _, score in scores_of(self.workspace, task["scores"])}
        samples = list(read_samples(self.generated.local(task["name"])))
        kept = [s for s in samples if Rank.of(s.id, scores[s.id]) >= self.lowest]
        ids = {s.id for s in kept}
        told = [
            {
                "id": s.id,
                "domain": s.domain,
                "tokens": len(s.input_ids),
                "score": scores[s.id],
                "kept": s.id in ids,
            }
            for s in samples
        ]
        with self.workspace.scratch() as scratch:
            write_samples(scratch / "samples", kept)
            self.workspace.put(task["name"], scratch / "samples")
        self.workspace.put_json(task["scores"].replace("scores-", "selection-"), told)
        return {
            "samples": len(kept),
            "tokens": sum(len(s.input_ids) for s in kept),
            "score": sum(scores[s.id] for s in kept),
            "domains": dict(Counter(s.domain for s in kept)),
        }
