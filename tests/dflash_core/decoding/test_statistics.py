"""Intervals: exact where they must be, and covering as often as they claim on simulated prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_core.decoding import statistics
from dflash_core.decoding.acceptance import tau
from dflash_core.decoding.statistics import bootstrap_ratio, bootstrap_tau, pairing_problem
from dflash_core.types import AcceptanceReport, Interval
from tests.dflash_core.acceptance_samples import BLOCK_SIZE, constant, drawn, drawn_pair, prompt, report


def test_constant_acceptance_has_no_spread() -> None:
    assert bootstrap_tau(constant(2), num_resamples=200) == Interval(3.0, 3.0, 3.0)


def test_a_report_against_itself_is_exactly_one() -> None:
    same = drawn(np.random.default_rng(0), num_prompts=40)
    assert bootstrap_ratio(same, same, num_resamples=500) == Interval(1.0, 1.0, 1.0)
    shuffled = replace(same, prompts=same.prompts[::-1])
    assert bootstrap_ratio(shuffled, same, num_resamples=500) == Interval(1.0, 1.0, 1.0)


def test_estimates_are_the_plain_ratios() -> None:
    one = drawn(np.random.default_rng(1))
    other = drawn(np.random.default_rng(2), skill=0.5)
    interval = bootstrap_tau(one, num_resamples=300)
    assert interval.estimate == tau(one)
    assert interval.low < interval.estimate < interval.high
    ratio = bootstrap_ratio(one, other, num_resamples=300)
    assert ratio.estimate == pytest.approx((tau(one) or 0) / (tau(other) or 1), rel=1e-12)


@pytest.mark.parametrize(("num_prompts", "t"), [(8, 2.365), (400, 1.966)])
def test_half_width_is_that_of_the_t_interval(num_prompts: int, t: float) -> None:
    # One round a prompt makes τ a plain mean, whose interval is known.
    values = np.arange(num_prompts) % BLOCK_SIZE
    one_round_each = report(*(prompt(str(i), [int(v)]) for i, v in enumerate(values)))
    interval = bootstrap_tau(one_round_each, num_resamples=20_000, seed=1)
    expected = t * values.std(ddof=1) / np.sqrt(num_prompts)
    assert (interval.high - interval.low) / 2 == pytest.approx(expected, rel=0.03)


def test_confidence_widens_and_the_seed_decides() -> None:
    one = drawn(np.random.default_rng(3))
    narrow, wide = (bootstrap_tau(one, confidence=c, num_resamples=2000) for c in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert bootstrap_tau(one, num_resamples=500, seed=1) == bootstrap_tau(one, num_resamples=500, seed=1)
    assert bootstrap_tau(one, num_resamples=500, seed=1) != bootstrap_tau(one, num_resamples=500, seed=2)


def test_chunks_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        drawn(np.random.default_rng(4), num_prompts=30),
        drawn(np.random.default_rng(5), num_prompts=30),
    )
    whole = bootstrap_ratio(one, other, num_resamples=300)
    monkeypatch.setattr(statistics, "_CHUNK_COUNTS", 70)
    assert bootstrap_ratio(one, other, num_resamples=300) == whole


def test_pairing_narrows() -> None:
    easy_and_hard = drawn(np.random.default_rng(6), num_prompts=60, spread=0.15)
    slightly_worse = replace(
        easy_and_hard,
        prompts=tuple(
            prompt(p.id, [max(0, a - (r % 4 == 0)) for r, a in enumerate(p.accepted)], domain=p.domain)
            for p in easy_and_hard.prompts
        ),
    )
    paired = bootstrap_ratio(slightly_worse, easy_and_hard, num_resamples=1000)
    alone = bootstrap_tau(easy_and_hard, num_resamples=1000)
    assert (paired.high - paired.low) / paired.estimate < (alone.high - alone.low) / alone.estimate / 2


def test_domains_are_strata_so_that_their_mix_is_no_noise() -> None:
    # Within a domain every prompt is the same: resampled within domains, nothing is left to chance.
    mixed = report(
        *(prompt(f"a{i}", [1, 1], domain="a") for i in range(10)),
        *(prompt(f"b{i}", [5, 5], domain="b") for i in range(9)),
    )
    interval = bootstrap_tau(mixed, num_resamples=200)
    assert interval.low == interval.high == tau(mixed)
    other = replace(mixed, prompts=tuple(prompt(p.id, [2, 2], domain=p.domain) for p in mixed.prompts))
    ratio = bootstrap_ratio(mixed, other, num_resamples=200)
    assert ratio.low == ratio.high == ratio.estimate


def test_small_domains_do_not_hide_their_spread() -> None:
    # A domain each: strata of one prompt would have no spread at all.
    each_its_own = report(*(prompt(str(i), [i % 6, i % 6], domain=str(i)) for i in range(12)))
    one_domain = replace(each_its_own, prompts=tuple(replace(p, domain="x") for p in each_its_own.prompts))
    width, expected = (
        (i.high - i.low) for i in (bootstrap_tau(r, num_resamples=4000) for r in (each_its_own, one_domain))
    )
    assert width == pytest.approx(expected, rel=0.1)
    # A lone prompt beside a large domain is resampled with that one.
    lone = report(*(prompt(f"a{i}", [2]) for i in range(9)), prompt("b", [7], domain="b"))
    assert bootstrap_tau(lone, num_resamples=1000).high > (tau(lone) or 0)


def test_prompts_without_rounds_are_left_out() -> None:
    one = drawn(np.random.default_rng(7))
    padded = replace(one, prompts=(prompt("z0", []), *one.prompts, prompt("z1", [])))
    assert bootstrap_tau(padded, num_resamples=300) == bootstrap_tau(one, num_resamples=300)
    assert bootstrap_ratio(padded, padded, num_resamples=300) == Interval(1.0, 1.0, 1.0)


def test_one_prompt_shows_no_spread_so_all_is_possible() -> None:
    single = report(prompt("a", [3, 4]))
    assert bootstrap_tau(single) == Interval(4.5, 1.0, BLOCK_SIZE)
    assert bootstrap_ratio(single, single) == Interval(1.0, 1 / BLOCK_SIZE, BLOCK_SIZE)


def test_a_prompt_that_only_one_drafter_took_rounds_on_does_no_harm() -> None:
    champion = report(prompt("a", [1, 2]), prompt("b", [1]))
    candidate = report(prompt("a", [2, 3]), prompt("b", []))
    ratio = bootstrap_ratio(candidate, champion, num_resamples=200)
    assert ratio.estimate == pytest.approx(3.5 / (7 / 3))
    assert ratio.low <= ratio.estimate <= ratio.high < float("inf")


def test_nothing_measured_has_no_interval() -> None:
    for nothing in (report(), report(prompt("a", []))):
        with pytest.raises(ValueError, match="no verify round"):
            bootstrap_tau(nothing)
        with pytest.raises(ValueError, match="no verify round"):
            bootstrap_ratio(nothing, nothing)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (report(prompt("a", [1])), "1 prompts were measured for one drafter only, 'b'"),
        (report(prompt("a", [1]), prompt("b", [1], domain="code")), "different domains"),
        (report(prompt("a", [1]), prompt("a", [1])), "twice"),
    ],
)
def test_unpaired_prompts_are_refused(other: AcceptanceReport, words: str) -> None:
    one = report(prompt("a", [1]), prompt("b", [1]))
    assert pairing_problem(one, one) is None
    with pytest.raises(ValueError, match=words):
        bootstrap_ratio(one, other)


@pytest.mark.parametrize(("degrees", "table"), [(4, 2.776), (7, 2.365), (23, 2.069), (400, 1.966)])
def test_t_quantile_against_the_printed_table(degrees: int, table: float) -> None:
    assert statistics._t_quantile(0.975, degrees) == pytest.approx(table, abs=6e-4)


@pytest.mark.parametrize("num_prompts", [9, 20])
def test_intervals_cover_as_often_as_they_claim(num_prompts: int) -> None:
    """95 % intervals over 300 simulated evaluations: the true τ and the true ratio lie inside in 90 to 99 %.

    The standard error of a coverage of 95 % over 300 is 1.3 %; per-round intervals would cover 60 to 70 %.
    """
    skills = (0.6, 0.7)
    many = drawn_pair(np.random.default_rng(1), num_prompts=20_000, skills=skills)
    true_candidate, true_champion = (tau(r) or 0 for r in many)
    generator = np.random.default_rng(11)
    hits = np.zeros(2)
    for seed in range(300):
        candidate, champion = drawn_pair(generator, num_prompts=num_prompts, skills=skills)
        alone = bootstrap_tau(champion, num_resamples=400, seed=seed)
        ratio = bootstrap_ratio(candidate, champion, num_resamples=400, seed=seed)
        hits += [
            alone.low <= true_champion <= alone.high,
            ratio.low <= true_candidate / true_champion <= ratio.high,
        ]
    assert (hits / 300 >= 0.90).all(), hits / 300
    assert (hits / 300 <= 0.995).all(), hits / 300
