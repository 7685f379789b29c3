"""Which entries of a store are needed, and in which order the others go."""

from __future__ import annotations

from typing import Any

from dflash_core.store.retention import RECENT, Entry, Kind, Policy, Served, decide

DAY = 86_400.0
NOW = 100 * DAY
OLD = Policy(older_than=14 * DAY, keep_bytes=None)


def sha(letter: str) -> str:
    return letter * 64


def entry(stage: str, letter: str, days: float = 30, **more: Any) -> Entry:
    kind = more.pop("kind", Kind.ARTIFACT)
    identity = sha(letter)
    offers = frozenset({identity, *more.pop("offers", ())}) if kind is Kind.ARTIFACT else frozenset()
    feeds = more.pop("feeds", ())
    used, name = NOW - days * DAY, f"{stage}/{identity}{'' if kind is Kind.ARTIFACT else '.' + kind}"
    return Entry(
        name, stage, identity, kind, more.pop("size", 100), used, more.pop("inputs", {}), offers, feeds
    )


def removed(entries: list[Entry], policy: Policy = OLD, **more: Any) -> set[str]:
    served, live = more.get("served", []), frozenset(more.get("live", ()))
    return {
        d.entry.stage + d.entry.identity[0] for d in decide(entries, served, live, policy, NOW) if d.removed
    }


def lineage(letters: str, drafter: str, **train: Any) -> list[Entry]:
    prompts, generate, extract, made = letters
    return [
        entry("prompts", prompts),
        entry("generate", generate, inputs={"prompts": sha(prompts)}),
        entry("extract", extract, inputs={"samples": sha(generate), "target": sha("7")}),
        entry("train", made, inputs={"features": sha(extract), **train}, offers=[sha(drafter)]),
    ]


def test_what_a_serving_drafter_was_made_of_stays_and_its_parents_features_go() -> None:
    parent, child = lineage("1234", "5"), lineage("abcd", "e", parent=sha("5"))
    entries = [*parent, *child, entry("evaluate", "6", inputs={"drafter": sha("e")})]
    champion = Served(sha("e"), "version 2", frozenset())
    assert removed(entries, served=[champion]) == {"prompts1", "generate2", "extract3", "train4"}
    # Held in the registry under another's name only: by what the registry says it was made of.
    assert "extractc" not in removed(entries, served=[Served(sha("0"), "v", frozenset({sha("c")}))])
    assert "evaluate6" in removed(entries)


def test_what_a_live_run_reads_stays_and_of_a_drafter_it_reads_only_that() -> None:
    entries = [
        *lineage("1234", "5"),
        *lineage("abcd", "e"),
        entry("train", "f", kind=Kind.PARTIAL, inputs={"features": sha("c"), "parent": sha("5")}),
    ]
    live = {f"train-{sha('f')}"}
    assert removed(entries, live=live) == {"prompts1", "generate2", "extract3", "traind"}
    assert "trainf" in removed(entries)


def test_notes_stay_and_so_does_what_is_young_or_was_used_within_the_hour() -> None:
    entries = [
        *(entry(stage, "1") for stage in ("settled", "budget", "gate")),
        entry("extract", "2", days=13),
        entry("extract", "3", days=15),
        entry("extract", "4", days=0.01),
    ]
    assert removed(entries) == {"extract3"}
    assert removed(entries, Policy(None, 0)) == {"extract2", "extract3"}


def test_over_the_bytes_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    entries = [entry("extract", str(i), days=i, size=10) for i in range(1, 6)]
    assert removed(entries, Policy(None, 30)) == {"extract5", "extract4"}
    assert removed(entries, Policy(4.5 * DAY, 30)) == {"extract5", "extract4"}
    assert removed(entries, Policy(2.5 * DAY, 30)) == {"extract5", "extract4", "extract3"}
    champion = Served(sha("0"), "v", frozenset({sha("5")}))
    assert removed(entries, Policy(None, 30), served=[champion]) == {"extract4", "extract3"}


def test_left_overs_go_by_age_and_half_removed_ones_at_once() -> None:
    entries = [
        entry("extract", "1", kind=Kind.PARTIAL),
        entry("extract", "2", kind=Kind.PARTIAL, days=1),
        entry("extract", "3", kind=Kind.DAMAGED),
        entry("extract", "4", kind=Kind.REMNANT, days=0),
    ]
    assert removed(entries) == {"extract1", "extract3", "extract4"}
    assert removed(entries, live={f"extract-{sha('4')}"}) == {"extract1", "extract3"}


def prompts_of(run: str, target: str, train: str, gate: str) -> list[Entry]:
    """Stages `prompts` (identity `run`) and `inspect` (identity `target`) of one run."""
    named = frozenset({sha(target), sha(train)})
    return [
        entry("prompts", run, feeds=(("inspect", frozenset({sha(train), sha(gate)})),)),
        entry(
            "inspect",
            run,
            inputs={"target": sha(target), "train": sha(train), "gate": sha(gate)},
            feeds=(("generate", named), ("evaluate", frozenset({sha(target), sha(gate)}))),
        ),
    ]


def test_who_only_shares_the_gate_prompts_or_the_target_is_not_what_a_drafter_was_made_of() -> None:
    generate = entry("generate", "b", inputs={"target": sha("7"), "prompts": sha("1")})
    trained = entry("train", "c", inputs={"features": sha("b")}, offers=[sha("e")])
    entries = [
        *(*prompts_of("a", "7", "1", "9"), generate, trained),
        *prompts_of("2", "7", "f", "9"),  # another run's prompts, gated on the same
        *prompts_of("3", "8", "1", "9"),  # the same prompts for another target: one choice, another rendering
    ]
    champion = Served(sha("e"), "version 2", frozenset())
    went = removed(entries, served=[champion])
    assert went == {"prompts2", "inspect2", "inspect3"}
    why = {d.entry.name: d.why for d in decide(entries, [champion], frozenset(), OLD, NOW)}
    assert why[trained.name] == "holds version 2"
    assert why[f"inspect/{sha('a')}"] == "version 2 was made of it"

    measuring = entry(
        "evaluate",
        "d",
        kind=Kind.PARTIAL,
        inputs={"target": sha("7"), "prompts": sha("9"), "drafter": sha("0")},
    )
    live = {measuring.lease_key}
    went = removed([*entries, measuring], live=live)
    assert {"inspecta", "inspect2"} & went == set()
    assert "inspect3" in went


def test_what_stays_says_why() -> None:
    old, young = entry("extract", "1", days=13), entry("extract", "2", days=0.01)

    def why(policy: Policy) -> list[str]:
        return [d.why for d in decide([old, young], [], frozenset(), policy, NOW)]

    assert why(OLD) == ["nobody needs it, but it is not old enough", RECENT]
    assert why(Policy(None, 1_000))[0] == "nobody needs it, but the store is within its bytes"
