"""The vLLM generation engine: token ids in, token ids out, the checkpoint's own defaults left aside.

vLLM is no dependency of ours and is imported here only, when an engine is made. It runs inside the
calling process, whose memory it takes for itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dflash_core.errors import UserError
from dflash_core.generation.engine import Answer, Ending, GenerationSettings, Request

if TYPE_CHECKING:
    from dflash_core.types import TargetConfig

_BYTES = {"float32": 4, "bfloat16": 2}


def require_vllm() -> None:
    """Raise UserError where vLLM cannot be imported; costs no import."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "--generate.engine vllm needs vLLM, which is not installed beside this program: "
            "install vllm there, or leave the flag out"
        )


class VllmEngine:
    """Answers requests with vLLM. See `engine.Engine`.

    Requests go in sorted by id and one process does everything, without a prefix cache, so that the same
    requests are scheduled alike each time. batch_tokens sizes the KV cache on CPUs, where vLLM would take
    nearly all memory; on GPUs it takes `gpu_share` of the device's memory, weights included.
    """

    def __init__(
        self,
        path: Path,
        config: TargetConfig,
        settings: GenerationSettings,
        *,
        device: Literal["cpu", "cuda"],
        dtype: Literal["float32", "bfloat16"],
        batch_tokens: int,
        gpus: float,
        threads: int,
    ) -> None:
        require_vllm()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if device == "cpu":
            # Its own binding would put every actor of the machine on the same cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from vllm import EngineArgs, LLMEngine, __version__

        self.settings = settings
        self._version = __version__
        arguments: dict[str, Any] = {
            "model": str(path),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # its neutral defaults: not the checkpoint's penalties and filters
            "dtype": dtype,
            "max_model_len": config.max_positions,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        if device == "cpu":
            tokens = max(batch_tokens, config.max_positions)
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": tokens * _kv_bytes(config, dtype)}
        else:
            arguments |= {"tensor_parallel_size": max(1, int(gpus)), "gpu_memory_utilization": _share(gpus)}
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._waiting: list[Request] = []

    @property
    def version(self) -> str:
        return f"vllm {self._version}"

    def submit(self, requests: Iterable[Request]) -> None:
        self._waiting += requests

    def answers(self) -> Iterator[Answer]:
        while self._waiting or self._engine.has_unfinished_requests():
            for request in sorted(self._waiting, key=lambda r: r.id):
                self._add(request)
            self._waiting.clear()
            finished = [output for output in self._engine.step() if output.finished]
            for output in sorted(finished, key=lambda o: o.request_id):
                yield self._answer(output)

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = self.settings
        sampled = settings.temperature > 0
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p if sampled else 1.0,
            seed=request.seed if sampled else None,
            max_tokens=settings.max_new_tokens,
            stop_token_ids=sorted(settings.stop_ids),
            ignore_eos=True,  # our stop tokens are all of them
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request.id, {"prompt_token_ids": list(request.prompt_ids)}, params)

    def _answer(self, output: Any) -> Answer:
        (completion,) = output.outputs
        if completion.finish_reason not in ("stop", "length"):
            raise UserError(
                f"vLLM ended a request for the reason {completion.finish_reason!r}: look into its log, or "
                "leave --generate.engine out"
            )
        return Answer(
            output.request_id, tuple(completion.token_ids), cast("Ending", completion.finish_reason)
        )


def _kv_bytes(config: TargetConfig, dtype: str) -> int:
    """Of one token, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _BYTES[dtype]


def _share(gpus: float) -> float:
    """Of a device's memory: what vLLM takes by default of a whole one."""
    return 0.9 * min(1.0, gpus)
