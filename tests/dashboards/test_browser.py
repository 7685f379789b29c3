"""The pages in a real browser: layout, keyboard, colors, and that a hostile report stays harmless."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.dashboards.conftest import FAMILY, History

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no `chromium` on the PATH: install the Debian package"
)
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright comes with the `test` extra")


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright_api.Browser]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console said."""
    return []


@pytest.fixture
def page(browser: playwright_api.Browser, complaints: list[str]) -> Iterator[playwright_api.Page]:
    page = browser.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    page.close()


def test_from_the_overview_to_a_family_by_keyboard(
    page: playwright_api.Page, site: str, complaints: list[str]
) -> None:
    page.goto(site)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == FAMILY:
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/family/**")
    assert page.locator("h1").inner_text() == FAMILY
    assert page.locator("svg .mark").count() == 8
    assert complaints == []


@pytest.mark.parametrize("width", [400, 768, 1280])
def test_no_page_is_wider_than_the_screen(page: playwright_api.Page, site: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for path in ("/", f"/family/{quote(FAMILY, safe='')}"):
        page.goto(site + path)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_light_and_dark_follow_the_system(page: playwright_api.Page, site: str) -> None:
    colors = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(site)
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colors) == 2


def test_a_report_runs_no_script(page: playwright_api.Page, site: str, history: History) -> None:
    page.goto(f"{site}/report/{history.run_ids['base']}")
    assert page.locator("h1").inner_text() == "Hello"
    assert page.title() == "Report"
