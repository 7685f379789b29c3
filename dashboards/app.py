"""The pages: what is asked, what is answered, and with which headers."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException

from dashboards.charts import COMPACT, NUM_COMPACT, NUM_WIDE, SMALL, WIDE, position_chart, tau_chart
from dashboards.data import Source, UnavailableError
from dashboards.wording import FILTERS
from dflash_core import tags as t

PAGE_POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'"
REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
"""A report is a file from the artifact store: whatever stands in it runs no script and loads nothing."""
NUM_LAST_DECISIONS = 12


class Page(Protocol):
    """Renders a template with what every page shows."""

    def __call__(self, template: str, status: int = 200, **values: object) -> HTMLResponse: ...


def create_app(source: Source) -> FastAPI:
    """The dashboard over `source`. Every page is rendered from what MLflow says at that moment."""
    app = FastAPI(title="DFlash drafters", docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    app.middleware("http")(_harden)
    page = _renderer(source)

    @app.get("/healthz")
    def health() -> Response:
        """That this process answers; whether MLflow does is another question, which the pages answer."""
        return PlainTextResponse("ok\n")

    _add_pages(app, source, page)
    _add_errors(app, page)
    threading.Thread(target=_import_mlflow, daemon=True).start()
    return app


def _add_pages(app: FastAPI, source: Source, page: Page) -> None:
    @app.get("/")
    def overview() -> Response:
        families = source.families()
        charts = {family.name: tau_chart(family.decisions, COMPACT, NUM_COMPACT) for family in families}
        decisions = [decision for family in families for decision in family.decisions]
        decisions.sort(key=lambda decision: decision.at, reverse=True)
        return page(
            "overview.html", families=families, charts=charts, decisions=decisions[:NUM_LAST_DECISIONS]
        )

    @app.get("/family/{name}")
    def family(name: str) -> Response:
        found = source.family(name)
        if found is None:
            raise HTTPException(404, f"There is no family {name!r} here.")
        measured = next((d for d in found.decisions if d.champion or d.candidate), None)
        curves = source.acceptance(measured.run_id) if measured else {}
        return page(
            "family.html",
            family=found,
            chart=tau_chart(found.decisions, WIDE, NUM_WIDE),
            measured=measured,
            positions=position_chart(_named(curves), SMALL),
        )

    @app.get("/report/{run_id}")
    def report(run_id: str) -> Response:
        content = source.report(run_id)
        if content is None:
            raise HTTPException(404, f"Run {run_id!r} has no report here.")
        return HTMLResponse(content, headers={"Content-Security-Policy": REPORT_POLICY})


def _named(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """A champion that was measured alone is the one that serves; beside a candidate it is the old one."""
    champion = "champion before" if t.ACCEPTANCE_CANDIDATE in curves else "champion"
    names = {t.ACCEPTANCE_CANDIDATE: "candidate", t.ACCEPTANCE_CHAMPION: champion}
    return {names[key]: curve for key, curve in curves.items()}


def _add_errors(app: FastAPI, page: Page) -> None:
    @app.exception_handler(UnavailableError)
    def unavailable(_request: Request, error: UnavailableError) -> Response:
        return page("unavailable.html", 503, problem=str(error))

    @app.exception_handler(HTTPException)
    def refused(_request: Request, error: HTTPException) -> Response:
        return page("missing.html", error.status_code, problem=error.detail)


def _renderer(source: Source) -> Page:
    pages = Environment(
        loader=PackageLoader("dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(FILTERS)

    def page(template: str, status: int = 200, **values: object) -> HTMLResponse:
        shared = {"now": datetime.now(UTC), "tracking_uri": source.shown_uri, "t": t}
        return HTMLResponse(pages.get_template(template).render(shared | values), status_code=status)

    return page


async def _harden(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers.setdefault("Content-Security-Policy", PAGE_POLICY)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    if not request.url.path.startswith("/static/"):
        response.headers["Cache-Control"] = "no-store"
    return response


def _import_mlflow() -> None:
    """Ahead of the first page, which otherwise would wait three seconds for it."""
    from dflash_core.tracking import quiet_mlflow

    quiet_mlflow()
    import mlflow.tracking  # noqa: F401
