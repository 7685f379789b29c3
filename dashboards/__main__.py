"""`python -m dashboards --tracking-uri URI`: serve the pages until interrupted."""

from __future__ import annotations

import argparse
import socket
import sys

from dflash_core.errors import DFlashError, UserError
from dflash_core.tracking import DEFAULT_TRACKING_URI


def main(argv: list[str]) -> int:
    """Serve; returns the exit code, 2 if the tracking URI or the address cannot be used."""
    options = _parse(argv)
    try:
        serve(options.tracking_uri, options.host, options.port)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        pass  # how a person ends it
    return 0


def serve(tracking_uri: str, host: str, port: int) -> None:
    """Blocks until interrupted. Raises UserError if the URI or the address cannot be used."""
    from dashboards.data import Source

    source = Source(tracking_uri)
    listener = _listen(host, port)
    import uvicorn

    from dashboards.app import create_app

    shown = f"[{host}]" if ":" in host else host
    print(f"Dashboard of {source.shown_uri} on http://{shown}:{listener.getsockname()[1]}/", flush=True)
    uvicorn.Server(uvicorn.Config(create_app(source), log_level="warning")).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything else is loaded, so that a taken port is told at once."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}:{port} ({why}); pass another --host or --port") from error


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dashboards",
        description="Web pages on the drafters in MLflow: families, versions, who serves which target.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tracking-uri", default=DEFAULT_TRACKING_URI, metavar="URI", help="MLflow to read")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; the pages ask for no password, so mind who can reach it",
    )
    parser.add_argument("--port", default=8050, type=int, help="port to listen on, 0 for any free one")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
