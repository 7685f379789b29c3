"""PruneConfig: everything `jobs/prune.py` can be told."""

from __future__ import annotations

from pydantic import Field

from pipelines.config import Section

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class PruneConfig(Section):
    """One clearing of a store."""

    store: str = Field("dflash-store", min_length=1)
    """Store to be cleared: a directory or an fsspec URI."""
    tracking_uri: str | None = Field(None, min_length=1, json_schema_extra={"metavar": "URI"})
    """MLflow tracking URI whose drafters are kept; unset: those that the store was used with."""
    ignore_registries: tuple[str, ...] = Field(
        (),
        json_schema_extra={"metavar": "URI", "form": "a tracking URI, and several by repeating the flag"},
    )
    """Tracking URIs that the store was used with and that are gone for good; unset: none is."""
    older_than: str | None = Field(
        None,
        pattern=r"^\d+(\.\d+)?[mhdw]$",
        json_schema_extra={"metavar": "AGE", "form": "an age such as 14d, 36h, 90m or 4w"},
    )
    """Remove what nobody needs or used for so long, an hour at least: 36h, 14d; unset: no age is too old."""
    keep_bytes: str | None = Field(
        None,
        pattern=r"^\d+(\.\d+)? ?[kMGT]B$",
        json_schema_extra={"metavar": "SIZE", "form": "a size such as 500GB, 1.5TB or 20MB"},
    )
    """Remove what nobody needs or used for an hour, oldest first, down to this: 500GB; unset: no limit."""

    @property
    def seconds(self) -> float | None:
        """`older_than` in seconds."""
        return (
            None if self.older_than is None else float(self.older_than[:-1]) * _SECONDS[self.older_than[-1]]
        )

    @property
    def bytes(self) -> int | None:
        """`keep_bytes` in bytes."""
        if self.keep_bytes is None:
            return None
        return int(float(self.keep_bytes[:-2]) * _BYTES[self.keep_bytes[-2:]])
