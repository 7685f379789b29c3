"""The pages over HTTP, from a real server process over a real registry."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi.testclient import TestClient

from dashboards.app import create_app
from dashboards.data import Source
from tests.dashboards.conftest import CHECKOUT, FAMILY, IMAGE, SCRIPT, History


def text_of(page: str) -> str:
    """What a reader sees, in one line."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", page)))


def test_the_overview_tells_the_whole_story(site: str) -> None:
    response = httpx.get(site)
    assert response.status_code == 200
    shown = text_of(response.text)
    assert "1 family" in shown.replace("family 1", "1 family")
    assert f"{FAMILY} v3 waits for a person." in shown
    assert "Champion v2 5.50 5.30–5.70 block 8" in shown
    assert "v2 sft-2" in shown  # certified: the champion serves it too
    assert "v1 base" in shown
    assert "held v3" in shown
    assert "1.50 1.30–1.70 → 5.50 5.30–5.70" in shown
    assert "1 min 15 s" in shown


def test_the_chart_shows_every_measurement_and_marks_promotions(site: str) -> None:
    page = httpx.get(site).text
    kinds = re.findall(r'class="mark is-(\w+)"', page)
    expected = ["promoted", "before", "promoted", "certified", "before", "rejected", "before", "held"]
    assert kinds == expected
    assert re.findall(r'class="flag"[^>]*>(v\d)<', page) == ["v1", "v2"]
    assert "sft-1, champion before: τ 1.50, interval 1.30 to 1.70; open the report" in unescape(page)


def test_a_family_has_its_own_page(site: str, history: History) -> None:
    response = httpx.get(f"{site}/family/{quote(FAMILY, safe='')}")
    assert response.status_code == 200
    shown = text_of(response.text)
    assert "num_speculative_tokens 7 in vLLM" in shown
    assert f'"models:/{FAMILY}@champion"' in shown
    assert "v3 challenger" in shown
    assert "v2 champion" in shown
    assert "v1 previous" in shown
    assert "Acceptance by position on rl-1" in shown
    assert "candidate, position 1: 90.0%" in shown
    assert "champion before, position 3: 10.0%" in shown
    for run_id in history.run_ids.values():
        assert f"/report/{run_id}" in response.text


@pytest.mark.parametrize(
    ("path", "written"), [("/", SCRIPT), ("/", IMAGE), (FAMILY, SCRIPT), (FAMILY, IMAGE), (IMAGE, IMAGE)]
)
def test_what_others_wrote_is_shown_and_never_run(site: str, path: str, written: str) -> None:
    response = httpx.get(site if path == "/" else f"{site}/family/{quote(path, safe='')}")
    assert written in unescape(response.text)
    assert "<script" not in response.text
    assert "<img src=x" not in response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "script-src" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_a_report_is_served_in_a_sandbox(site: str, history: History) -> None:
    response = httpx.get(f"{site}/report/{history.run_ids['base']}")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "<h1>Hello</h1>" in response.text
    assert response.headers["content-security-policy"].startswith("sandbox; default-src 'none'")


@pytest.mark.parametrize("run_id", ["0" * 32, "nope", "..%2f..%2fetc%2fpasswd", "A" * 32])
def test_a_report_that_is_not_there(site: str, run_id: str) -> None:
    response = httpx.get(f"{site}/report/{run_id}")
    assert response.status_code == 404
    assert "Not here" in response.text


def test_runs_of_others_have_no_report_here(site: str, history: History) -> None:
    client = history.registry.client
    run_id = client.create_run("0").info.run_id
    client.log_text(run_id, "secret", "report/report.html")
    assert httpx.get(f"{site}/report/{run_id}").status_code == 404


def test_models_of_others_are_no_family(site: str, history: History) -> None:
    history.registry.client.create_registered_model("somebody's classifier")
    assert "classifier" not in httpx.get(site).text
    assert httpx.get(f"{site}/family/somebody's classifier").status_code == 404


def test_an_unknown_page_is_a_page(site: str) -> None:
    response = httpx.get(f"{site}/no/such/page")
    assert response.status_code == 404
    assert "All families" in response.text


def test_health_asks_nobody_else(site: str) -> None:
    assert httpx.get(f"{site}/healthz").text == "ok\n"


def test_an_empty_registry_names_the_first_command_and_stays_empty(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new.db"
    with TestClient(create_app(Source(uri))) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert f"python jobs/realign.py --target path/to/checkpoint \\ --tracking-uri {uri}" in text_of(
            page.text
        )
        assert client.get("/family/x").status_code == 404
        assert client.get(f"/report/{'0' * 32}").status_code == 404
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_said_so_without_its_password(tmp_path: Path) -> None:
    with TestClient(create_app(Source("http://ann:secret@127.0.0.1:9"))) as client:
        for path in ("/", "/family/x", f"/report/{'0' * 32}"):
            page = client.get(path)
            assert page.status_code == 503
            assert "The MLflow server at http://127.0.0.1:9 does not answer" in text_of(page.text)
            assert "secret" not in page.text
        assert client.get("/healthz").status_code == 200


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dashboards", *arguments]
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_bad_uri_and_a_taken_port_are_one_sentence_each(tmp_path: Path) -> None:
    bad = run_module("--tracking-uri", "mlruns")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1
    assert "sqlite:///" in bad.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        clash = run_module("--tracking-uri", f"sqlite:///{tmp_path}/x.db", "--port", port)
    assert clash.returncode == 2
    assert clash.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert clash.stderr.count("\n") == 1


def test_an_interrupt_ends_it_in_silence(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dashboards",
        "--port",
        "0",
        "--tracking-uri",
        f"sqlite:///{tmp_path}/x.db",
    ]
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        stdout=pipe,
        stderr=pipe,
        text=True,
        # A shell starts its background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )
    assert server.stdout is not None
    assert "http://127.0.0.1:" in server.stdout.readline()
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=60) == ("", "")
    assert server.returncode == 0


def test_nothing_of_the_pipelines_is_imported() -> None:
    code = (
        "import sys, dashboards.app, dashboards.__main__;"
        "print(sorted({'pipelines', 'ray', 'torch', 'mlflow'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
