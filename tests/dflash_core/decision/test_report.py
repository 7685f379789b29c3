"""report.json is strict and complete; report.html is one page that is well formed, escaped and honest."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.decision.gate import GatePolicy, decide, still_fits
from dflash_core.decision.report import RealignReport, write_report
from dflash_core.decoding.acceptance import summary_json
from dflash_core.types import AcceptanceReport, GateDecision, Outcome
from tests.dflash_core.acceptance_samples import constant, drawn_pair, prompt, report

POLICY = GatePolicy(min_tau=1.5, num_resamples=300)
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
VOID = {"meta", "link", "br", "img", "input", "hr"}


def realign(
    outcome: Outcome,
    decision: GateDecision,
    candidate: AcceptanceReport | None,
    champion: AcceptanceReport | None,
    **change: Any,
) -> RealignReport:
    made = RealignReport(
        outcome=outcome,
        model_name="qwen3-64x4",
        model_version=None,
        target_path="checkpoints/step-100",
        target_fingerprint="a" * 64,
        drafter_fingerprint="d" * 64,
        decision=decision,
        not_certified=None,
        candidate=candidate,
        champion=champion,
        stages=(
            ("inspect", "1" * 64, 0.1, False),
            ("generate", "2" * 64, 0.01, True),
            ("train", "3" * 64, 3725.0, False),
        ),
        lineage={"dflash.git_sha": "4" * 40},
        settings={"gate.min_tau": 1.5, "prompts": None, "odd": float("inf"), "path": Path("x/y")},
        mask_token_reason="token 3 is used by nothing else",
        created_at="2026-11-20T03:12:45+00:00",
    )
    return replace(made, **change)


def both(candidate_skill: float = 0.7, champion_skill: float = 0.4) -> RealignReport:
    candidate, champion = drawn_pair(
        np.random.default_rng(0), num_prompts=24, skills=(candidate_skill, champion_skill)
    )
    return realign(Outcome.PROMOTED, decide(candidate, champion, POLICY), candidate, champion)


def first_drafter() -> RealignReport:
    return realign(Outcome.PROMOTED, decide(constant(2), None, POLICY), constant(2), None)


def certified() -> RealignReport:
    champion = constant(2)
    return realign(Outcome.CERTIFIED, still_fits(champion, 3.0, POLICY), None, champion, model_version=3)


def certified_in_pairs() -> RealignReport:
    now, then = constant(2), constant(2)
    decision = still_fits(now, 3.0, POLICY, then)
    return realign(Outcome.CERTIFIED, decision, None, now, model_version=3)


def not_certified() -> RealignReport:
    return replace(both(), not_certified=still_fits(constant(1), 3.0, POLICY))


def nothing_measured() -> RealignReport:
    silent = report(*(prompt(f"p{i}", []) for i in range(9)))
    return realign(Outcome.REJECTED, decide(silent, silent, POLICY), silent, silent)


def hostile() -> RealignReport:
    named = report(
        *(prompt(f"{HOSTILE}{i}", [i % 5, 2], domain=HOSTILE + "domain" * 80) for i in range(12)),
        target=HOSTILE,
    )
    return realign(
        Outcome.HELD,
        decide(named, named, POLICY),
        named,
        named,
        model_name=HOSTILE,
        target_path=HOSTILE + "/long" * 60,
        drafter_fingerprint=HOSTILE,
        stages=((HOSTILE, HOSTILE, 1.0, False),),
        lineage={HOSTILE: HOSTILE},
        settings={HOSTILE: HOSTILE},
        mask_token_reason=HOSTILE,
    )


ALL = {
    "both": both,
    "rejected": lambda: replace(both(0.3, 0.7), outcome=Outcome.REJECTED),
    "first": first_drafter,
    "certified": certified,
    "certified in pairs": certified_in_pairs,
    "not certified": not_certified,
    "nothing": nothing_measured,
    "hostile": hostile,
}


class Page(HTMLParser):
    """Reads a page and insists that every element is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> repeats an attribute"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def written(made: RealignReport, directory: Path) -> tuple[dict[str, Any], Page]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    write_report(directory, made)
    assert sorted(p.name for p in directory.iterdir()) == ["report.html", "report.json"]
    text = (directory / "report.json").read_text(encoding="utf-8")
    html = (directory / "report.html").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse), Page(html)


def test_json_holds_everything(tmp_path: Path) -> None:
    made = both()
    data, _ = written(made, tmp_path)
    assert data["outcome"] == "promoted"
    assert data["reason"].startswith("All 7 checks passed")
    assert data["model"] == {"name": "qwen3-64x4", "version": None}
    assert data["target"] == {"path": "checkpoints/step-100", "fingerprint": "a" * 64}
    assert data["decision"]["verdict"] == "pass"
    assert data["decision"]["ratio"]["low"] > 1
    assert [check["name"] for check in data["decision"]["checks"]] == [c.name for c in made.decision.checks]
    assert made.candidate is not None
    assert data["candidate"] == summary_json(made.candidate)
    assert len(data["champion"]["by_prompt"]) == 24
    assert data["stages"][1] == {"name": "generate", "identity": "2" * 64, "seconds": 0.01, "cached": True}
    assert data["settings"] == {"gate.min_tau": 1.5, "prompts": None, "odd": "inf", "path": "x/y"}


def test_page_says_verdict_numbers_and_reasons(tmp_path: Path) -> None:
    made = both()
    data, page = written(made, tmp_path)
    tau, ratio = made.decision.tau_candidate, made.decision.ratio
    assert ratio is not None
    for words in (
        "Promoted",
        data["reason"],
        f"{tau.estimate:.2f}",
        f"95% interval {tau.low:.2f} to {tau.high:.2f}",
        f"{ratio.estimate:.2f}×",
        "2026-11-20 03:12 UTC",
        "found ready-made",
        "1 h 02 min",
        "token 3 is used by nothing else",
        "Prompts were decoded greedily, with at most 64 new tokens",
    ):
        assert words in page.text
    for check in made.decision.checks:
        assert check.measured in page.text
        assert check.required in page.text
        assert check.explanation[1:] in page.text


def test_charts_are_drawn_to_scale(tmp_path: Path) -> None:
    made = realign(Outcome.PROMOTED, decide(constant(3), constant(1), POLICY), constant(3), constant(1))
    _, page = written(made, tmp_path)
    lines = {a["class"]: a["points"] for tag, a in page.tags if tag == "polyline"}
    heights = {kind: [float(p.split(",")[1]) for p in (pts or "").split()] for kind, pts in lines.items()}
    # Accepting 3 of 7 drafts in every round: 100 % up to the third position, then nothing.
    assert heights["line candidate"] == [14.0] * 3 + [256.0] * 4
    assert heights["line champion"] == [14.0] + [256.0] * 6
    dots = [a for tag, a in page.tags if tag == "circle" and a["class"] == "prompt candidate"]
    assert len(dots) == 12
    assert len({(dot["cx"], dot["cy"]) for dot in dots}) == 1


@pytest.mark.parametrize("name", ALL)
def test_page_is_self_contained_and_accessible(name: str, tmp_path: Path) -> None:
    _, page = written(ALL[name](), tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    tags = [tag for tag, _ in page.tags]
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    for _, attributes in page.tags:
        assert not {"src", "href", "onload", "onerror", "onclick"} & attributes.keys()
    assert "url(" not in html
    assert "@import" not in html
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("title") >= 1
    assert tags.count("h1") == 1
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert named <= set(ids)


def test_strangers_words_stay_words(tmp_path: Path) -> None:
    data, page = written(hostile(), tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "alert(1)&lt;/script&gt;" in html
    assert "{{ 7 * 7 }}" in html
    # Read back, they are what they were: in text and in the charts' titles.
    assert HOSTILE in page.text
    assert data["candidate"]["by_prompt"][0]["id"] == HOSTILE + "0"


def test_nothing_measured_is_no_number(tmp_path: Path) -> None:
    data, page = written(nothing_measured(), tmp_path)
    assert data["candidate"]["tau"] is None
    assert "not measured" in page.text
    assert "Nothing to draw" in page.text
    assert "0.00" not in page.text
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_certified_speaks_of_the_champion_and_its_promise(tmp_path: Path) -> None:
    data, page = written(certified(), tmp_path)
    assert (data["candidate"], data["model"]["version"]) == (None, 3)
    assert "nothing was trained" in page.text
    assert "qwen3-64x4 version 3" in page.text
    assert "0.95 times the 3.00 of its promotion" in page.text
    assert "New drafter" not in page.text


def test_first_drafter_has_nothing_to_compare_with(tmp_path: Path) -> None:
    _, page = written(first_drafter(), tmp_path)
    assert "had no drafter before" in page.text
    assert "Champion so far" not in page.text


def test_many_prompts_are_cut_and_it_is_said(tmp_path: Path) -> None:
    many = constant(2, num_prompts=130)
    _, page = written(realign(Outcome.PROMOTED, decide(many, None, POLICY), many, None), tmp_path)
    assert "The 100 prompts of lowest τ" in page.text
    assert "All 130 are in report.json" in page.text


def test_browser_shows_it_at_any_width_without_asking_anyone(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    write_report(tmp_path, hostile())
    requested: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("request", lambda request: requested.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        for scheme, width in (("light", 1100), ("dark", 400)):
            tab.emulate_media(color_scheme=scheme)
            tab.set_viewport_size({"width": width, "height": 900})
            tab.goto((tmp_path / "report.html").as_uri())
            tab.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.close()
    assert requested == [(tmp_path / "report.html").as_uri()] * 2
    assert complaints == []
    assert background == "rgb(18, 20, 23)"
