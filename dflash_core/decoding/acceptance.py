"""The numbers in an `AcceptanceReport`: τ, acceptance by position, by domain and by prompt; JSON and a table.

Each number is defined here once, for gate, registry, dashboard and README alike. Intervals are in
`statistics`, decisions in `gate`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_core.fingerprint import SHORT
from dflash_core.text import bar, num_columns, pad, printable
from dflash_core.types import AcceptanceReport, PromptResult


@dataclass(frozen=True)
class DomainAcceptance:
    """Acceptance over the prompts of one domain."""

    tau: float | None
    tokens: int
    rounds: int
    prompts: int
    acceptance_by_position: tuple[float, ...]


def tau(report: AcceptanceReport) -> float | None:
    """Mean acceptance length: tokens emitted by verify rounds / verify rounds, over all prompts together.

    None without a single round (every answer was over with the token that prefill yields): nothing was
    measured then, and no number would be true.
    """
    return _tau(report.prompts)


def prompt_tau(prompt: PromptResult) -> float | None:
    """τ of one prompt; None if it took no round."""
    return _tau([prompt])


def acceptance_by_position(report: AcceptanceReport) -> tuple[float, ...]:
    """For k = 1 ... block_size - 1, the share of rounds whose first k drafts were all accepted and emitted.

    Empty without a single round. Where no answer ended inside a round, τ = 1 + the sum of these.
    """
    return _by_position(report.prompts, report.block_size)


def by_domain(report: AcceptanceReport) -> dict[str, DomainAcceptance]:
    """The same numbers for each domain, in order of name."""
    groups: dict[str, list[PromptResult]] = {}
    for prompt in report.prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    return {
        domain: DomainAcceptance(
            tau=_tau(prompts),
            tokens=sum(p.num_tokens for p in prompts),
            rounds=sum(p.num_rounds for p in prompts),
            prompts=len(prompts),
            acceptance_by_position=_by_position(prompts, report.block_size),
        )
        for domain, prompts in sorted(groups.items())
    }


def acceptance_rate(tau: float, block_size: int) -> float:
    """Share of a block's drafts that is accepted, (τ - 1) / (block_size - 1). Raises ValueError below 2."""
    return (tau - 1) / _num_drafts(block_size)


def tau_from_rate(rate: float, block_size: int) -> float:
    """The τ of an acceptance rate. Raises ValueError for a block size below 2."""
    return 1 + rate * _num_drafts(block_size)


def lossless(report: AcceptanceReport) -> bool | None:
    """Whether every prompt's output equals the target's own.

    False as soon as one differs; None while any was not compared, since that proves nothing.
    """
    compared = [p.lossless for p in report.prompts]
    if False in compared:
        return False
    return True if compared and None not in compared else None


def mean_seconds(report: AcceptanceReport) -> float | None:
    """Mean wall time of a prompt's rounds, in seconds; None without a prompt."""
    return math.fsum(p.seconds for p in report.prompts) / len(report.prompts) if report.prompts else None


def tokens_per_second(report: AcceptanceReport) -> float | None:
    """Tokens that verify rounds emitted per second of those rounds; None where no time was taken."""
    seconds = math.fsum(p.seconds for p in report.prompts)
    return report.tokens / seconds if seconds > 0 else None


def _tau(prompts: Iterable[PromptResult]) -> float | None:
    # A ratio of sums, not a mean of ratios: a long answer counts for more, as it does when serving.
    tokens, rounds = np.sum([(p.num_tokens, p.num_rounds) for p in prompts] or [(0, 0)], axis=0).tolist()
    return tokens / rounds if rounds else None


def _by_position(prompts: Sequence[PromptResult], block_size: int) -> tuple[float, ...]:
    accepted = np.array([a for p in prompts for a in p.accepted], dtype=np.int64)
    if not accepted.size:
        return ()
    counts = np.bincount(accepted, minlength=block_size)
    # Rounds that accepted at least k = all those that accepted k, k + 1, ...
    at_least = counts[::-1].cumsum()[::-1]
    return tuple((at_least[1:block_size] / accepted.size).tolist())


def _num_drafts(block_size: int) -> int:
    if block_size < 2:
        raise ValueError(f"a block of {block_size} holds no draft token")
    return block_size - 1


# ---- JSON ------------------------------------------------------------------------------------------------


def to_json(report: AcceptanceReport) -> dict[str, Any]:
    """`report` whole, as JSON-able data; `from_json` gives the equal report back."""
    return asdict(report)


def from_json(data: Mapping[str, Any]) -> AcceptanceReport:
    """The report in `to_json`'s data. Raises ValueError if it is not one or contradicts itself."""
    try:
        prompts = tuple(
            PromptResult(**{**row, "accepted": tuple(row["accepted"]), "emitted": tuple(row["emitted"])})
            for row in data["prompts"]
        )
        report = AcceptanceReport(**{**data, "prompts": prompts})
        broken = [p.id for p in prompts if not _plausible(p, report.block_size)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an acceptance report: {error}") from None
    if broken:
        raise ValueError(f"the acceptance of prompt {broken[0]!r} contradicts itself: measure it again")
    return report


def _plausible(prompt: PromptResult, block_size: int) -> bool:
    """Every round emits its accepted drafts and at most one token more, and never nothing."""
    return (
        len(prompt.accepted) == len(prompt.emitted)
        and all(
            0 <= accepted < block_size and max(1, accepted) <= emitted <= accepted + 1
            for accepted, emitted in zip(prompt.accepted, prompt.emitted, strict=False)
        )
        and math.isfinite(prompt.seconds)
    )


def summary_json(report: AcceptanceReport) -> dict[str, Any]:
    """Every number of this module as JSON-able data; `prompts` is a count, `by_prompt` lists them."""
    mean = tau(report)
    return {
        "tau": mean,
        "acceptance_rate": acceptance_rate(mean, report.block_size)
        if mean and report.block_size > 1
        else None,
        "tokens": report.tokens,
        "rounds": report.rounds,
        "prompts": len(report.prompts),
        "acceptance_by_position": list(acceptance_by_position(report)),
        "lossless": lossless(report),
        "mean_seconds": mean_seconds(report),
        "tokens_per_second": tokens_per_second(report),
        "block_size": report.block_size,
        "temperature": report.temperature,
        "max_new_tokens": report.max_new_tokens,
        "drafter_fingerprint": report.drafter_fingerprint,
        "target_fingerprint": report.target_fingerprint,
        "by_domain": {
            domain: {**asdict(row), "acceptance_by_position": list(row.acceptance_by_position)}
            for domain, row in by_domain(report).items()
        },
        "by_prompt": [
            {
                "id": p.id,
                "domain": p.domain,
                "tau": prompt_tau(p),
                "tokens": p.num_tokens,
                "rounds": p.num_rounds,
                "seconds": p.seconds,
                "lossless": p.lossless,
            }
            for p in report.prompts
        ],
    }


# ---- For the terminal ------------------------------------------------------------------------------------

_BAR_WIDTH = 40


def format_table(report: AcceptanceReport, *, unicode: bool | None = None) -> str:
    """A table by domain and the acceptance by position as bars; plain ASCII unless stdout takes UTF-8."""
    if unicode is None:
        unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
    parts = (_heading(report), _domain_rows(report, unicode), _curve_rows(report, unicode))
    return "\n\n".join("\n".join(part) for part in parts)


def _heading(report: AcceptanceReport) -> list[str]:
    sampling = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}"
    proof = {True: "yes", False: "NO: the output differs from the target's own", None: "not compared"}
    speed = tokens_per_second(report)
    return [
        f"drafter {report.drafter_fingerprint[:SHORT]} on target {report.target_fingerprint[:SHORT]}",
        f"block {report.block_size}, {sampling}, at most {report.max_new_tokens} new tokens, "
        + (f"{speed:.1f} tokens/s" if speed else "no time measured"),
        f"lossless: {proof[lossless(report)]}",
    ]


def _domain_rows(report: AcceptanceReport, unicode: bool) -> list[str]:
    domains = [(printable(name, unicode), row) for name, row in by_domain(report).items()]
    width = max([num_columns(name) for name, _ in domains] + [len("all domains")])
    rows = [
        f"{pad('domain', width)} {'prompts':>8} {'tokens':>8} {'rounds':>8} {'τ' if unicode else 'tau':>8}"
    ]
    rule = "-" * (width + 36)
    total = DomainAcceptance(tau(report), report.tokens, report.rounds, len(report.prompts), ())
    for name, row in [*domains, ("all domains", total)]:
        if row is total:
            rows.append(rule)
        mean = "none" if row.tau is None else f"{row.tau:.3f}"
        rows.append(f"{pad(name, width)} {row.prompts:>8,} {row.tokens:>8,} {row.rounds:>8,} {mean:>8}")
    return [rows[0], rule, *rows[1:]]


def _curve_rows(report: AcceptanceReport, unicode: bool) -> list[str]:
    curve = acceptance_by_position(report)
    if not curve:
        return ["no verify round was measured"]
    rows = [
        f"{k:>3} {pad(bar(share, _BAR_WIDTH, unicode), _BAR_WIDTH)} {share:>6.1%}"
        for k, share in enumerate(curve, 1)
    ]
    return ["share of rounds whose first k drafts were all accepted", *rows]
