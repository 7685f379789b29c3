"""Progress on a terminal and in a log, news, peak memory."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from pipelines.telemetry import progress, say


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Log lines without their timestamps; nothing may be on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    stamped = captured.err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in stamped)
    return [line[9:] for line in stamped]


def test_a_log_has_start_progress_with_rate_and_eta_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("generate", 1_200, "prompts", log_interval_seconds=0) as bar:
        bar.advance(200, tokens=1_000, loss=0.6)
        bar.advance(400, tokens=3_000, loss=0.51234)
        bar.advance(600, tokens=5_000, loss=0.25)
    started, first, half, full, finished = lines(capsys)
    assert started == "generate: started 0/1,200 prompts"
    assert "ETA" not in first
    assert re.fullmatch(
        r"generate: 600/1,200 prompts · \S+ prompts/s · ETA \d+s · tokens 4,000 · loss 0.5123", half
    )
    assert full.endswith("ETA 0s · tokens 9,000 · loss 0.25")
    assert re.fullmatch(
        r"generate: finished 1,200/1,200 prompts · \S+ prompts/s · \d+s · tokens 9,000 · loss 0.25", finished
    )


def test_the_eta_leaves_out_what_starting_up_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("pipelines.telemetry.time.monotonic", lambda: now)
    with progress("evaluate", 41, "prompts", log_interval_seconds=0) as bar:
        now = 20.0
        bar.advance(1)
        now = 24.0
        bar.advance(10)
        bar.advance(30)
    assert "ETA 12s" in lines(capsys)[2]


def test_what_is_found_on_the_way_is_done_but_does_not_make_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("pipelines.telemetry.time.monotonic", lambda: now)
    with progress("evaluate", 12, "prompts", log_interval_seconds=0) as bar:
        bar.advance(6, fresh=False, tokens=60)
        now = 2.0
        bar.advance(1, tokens=10)
        now = 3.0
        bar.advance(1, tokens=10)
    assert "evaluate: 8/12 prompts · 0.667 prompts/s · ETA 4s · tokens 80" in lines(capsys)


def test_a_log_is_quiet_between_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 1_000, "steps", log_interval_seconds=3600) as bar:
        for _ in range(1_000):
            bar.advance()
    assert len(lines(capsys)) == 2


def test_without_a_total_there_is_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("hash", None, "files", log_interval_seconds=0) as bar:
        bar.advance(3)
    started, running, _ = lines(capsys)
    assert started == "hash: started 0 files"
    assert re.fullmatch(r"hash: 3 files · \S+ files/s", running)


def test_what_an_earlier_run_did_counts_as_done_but_not_towards_the_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("extract", 10, "shards", done=9):
        pass
    started, finished = lines(capsys)
    assert started == "extract: started 9/10 shards"
    assert "shards/s" not in finished


def test_a_stage_that_fails_says_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), progress("extract", 10, "shards") as bar:
        bar.advance(4)
        raise RuntimeError
    assert lines(capsys)[-1].startswith("extract: stopped 4/10 shards")


def test_news_is_one_stamped_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("extract: cached")
    assert lines(capsys) == ["extract: cached"]


def on_terminal(code: str) -> str:
    """What a person sees on a terminal of 100 columns while `code` runs."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    with subprocess.Popen([sys.executable, "-c", code], stderr=follower) as process:
        os.close(follower)
        seen = b""
        while chunk := _read(leader):
            seen += chunk
    os.close(leader)
    assert process.returncode == 0
    return seen.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux: the other end was closed
        return b""


def test_a_terminal_gets_a_bar_and_news_above_it() -> None:
    seen = on_terminal(
        "from pipelines.telemetry import progress, say\n"
        "with progress('train', 4, 'steps') as bar:\n"
        "    bar.advance(2, loss=0.5)\n"
        "    say('checkpoint written')\n"
        "    bar.advance(2, loss=0.25)\n"
    )
    screens = [text.strip() for text in re.split(r"[\r\n]+", seen) if text.strip()]
    assert "checkpoint written" in screens
    assert re.fullmatch(r"train: 100%\|.*\| 4/4 \[.* steps/s, loss=0.25\]", screens[-1])


def test_peak_memory_sees_what_was_allocated() -> None:
    code = (
        "from pipelines.telemetry import peak_rss_mb\n"
        "print(peak_rss_mb())\n"
        "block = b'x' * 300_000_000\n"
        "del block\n"
        "print(peak_rss_mb())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(float, output.stdout.split())
    assert before < 280 < after < 600
