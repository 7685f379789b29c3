"""Sources of prompts, opened: each known by its content, its prompts streamed one at a time.

A file or folder is identified by its bytes, a hub dataset by its commit; where it lies does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.digest_cache import cache_file, load_digests, signature, store_digests
from dflash_core.checkpoints.strict_json import one_line
from dflash_core.corpus.trace_rows import FORMAT as TRACE_FORMAT
from dflash_core.corpus.trace_rows import to_traces
from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256, fingerprint
from dflash_core.prompts.hub_rows import HUB_ID, dataset_rows, resolved_revision
from dflash_core.prompts.json_lines import Rows, shown
from dflash_core.prompts.prompt_rows import FORMAT, check_encodable, check_readable, to_prompt
from dflash_core.prompts.row_files import file_rows, known_files
from dflash_core.prompts.source_guard import Look, check_unchanged, look
from dflash_core.prompts.source_spec import SourceSpec, parse_source
from dflash_core.types import Prompt

_SMALL_BYTES = 1 << 20
"""Reading so little takes no longer than looking its digest up."""
_LOOKED_AT = 20
"""Rows after a bad one that say whether the others are any better."""
_UNHELD = ("location", "revision", "weight")

OnBad = Callable[[UserError], None]


@dataclass(frozen=True)
class Source:
    """One source whose content is known."""

    spec: SourceSpec
    files: tuple[Path, ...] | None
    """Read by ourselves; None: read through `datasets`."""
    content: str
    """What its bytes are: sha256 of a file or of a folder's, or a commit."""
    prefix: str = ""
    """Before every id, where several sources might use the same ones."""
    seen: tuple[tuple[Path, Look | None], ...] = ()
    """What its files looked like before `content` was taken of them."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that its prompts depend on."""
        kept = {key: value for key, value in asdict(self.spec).items() if key not in _UNHELD}
        return {**kept, "name": self.spec.name, "content": self.content, "prefix": self.prefix}

    def check_unchanged(self) -> None:
        """Raise UserError if what was read may not be what `content` says; asked after the last pass."""
        check_unchanged(self.seen)
        if self.seen and self.files is None and look(_all_files(self.spec.path)) != self.seen:
            raise UserError(
                f"{self.spec.location} has other files than when it was opened; run again when it is complete"
            )

    def rows(self) -> Rows:
        """Its rows, in their order. Raises UserError for one that cannot be read."""
        if self.files is None:
            return dataset_rows(self.spec, None if self.spec.is_here else self.content)
        return (row for file in self.files for row in file_rows(file))

    def prompts(self, on_bad: OnBad = lambda _error: None) -> Iterator[Prompt]:
        """Its prompts, in their order.

        Raises UserError for a row that is no prompt, unless the spec says skip_bad: it goes to `on_bad`
        then. A row that cannot be read at all is an error in any case.
        """
        self._check_columns()
        number = num_usable = 0
        rows = self.rows()
        for number, (where, row) in enumerate(rows, start=1):
            default_id = f"{self.spec.name}/{number}"
            try:
                found = self._prompts_of(row, where, default_id)
            except UserError as error:
                if not self.spec.skip_bad:
                    raise self._with_remedy(error, rows, some_usable=num_usable > 0) from None
                on_bad(error)
                continue
            num_usable += 1
            for prompt in found:
                yield prompt if not self.prefix else _prefixed(prompt, self.prefix)
        if not number:
            what, form = ("traces", TRACE_FORMAT) if self.spec.traces else ("prompts", FORMAT)
            lines = self.files is not None and self.files[0].name.lower().endswith((".jsonl", ".jsonl.gz"))
            rows_needed = "one JSON object a line" if lines else "rows"
            raise UserError(f"{self.spec.location} holds no {what}; give it {rows_needed} with {form}")

    def _prompts_of(self, row: dict[str, Any], where: str, default_id: str) -> Sequence[Prompt]:
        """The prompts in a row. Raises UserError, whatever is wrong with it."""
        try:
            check_readable(row, where, self.spec)
            found: Sequence[Prompt]
            if self.spec.traces:
                found = to_traces(row, where, default_id, self.spec)
            else:
                found = (to_prompt(row, where, default_id, self.spec),)
            for prompt in found:
                check_encodable(prompt, where)
        # A stranger's row can be odd in more ways than the parsers know of.
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            what = "traces" if self.spec.traces else "prompts"
            raise UserError(
                f"{where} is not of the form that {what} have ({type(error).__name__}: {one_line(error)}); "
                "mend that row"
            ) from None
        return found

    def _with_remedy(self, error: UserError, rest: Rows, *, some_usable: bool) -> UserError:
        """`error` of a row, naming skip_bad where that would leave rows to use; looks at a few of `rest`."""
        try:
            for where, row in islice(rest, 0 if some_usable else _LOOKED_AT):
                with suppress(UserError):
                    self._prompts_of(row, where, "x")
                    some_usable = True
                    break
        except UserError:  # a row that cannot be read, which skip_bad does not help
            return error
        return UserError(f"{error}, or leave such rows out with ?skip_bad=1") if some_usable else error

    def _check_columns(self) -> None:
        """Raise UserError if a column that the query names is in no row; most often one row is looked at."""
        spec, usual = self.spec, SourceSpec("")
        named = {key: getattr(spec, key) for key in ("id", "domain_column", "tools")}
        missing = {key: name for key, name in named.items() if name and name != getattr(usual, key)}
        first: list[str] = []
        for _, row in self.rows() if missing else ():
            first = first or list(row)
            missing = {key: name for key, name in missing.items() if name not in row}
            if not missing:
                return
        for key, name in missing.items():
            if first:
                have = ", ".join(map(shown, first[:8]))
                raise UserError(
                    f"{spec.location} has no row with the column {shown(name)}, which ?{key}= names; "
                    f"name one of those it has, such as {have}"
                )


def open_sources(
    texts: Sequence[str], cache_dir: Path | None = None, *, traces: bool = False
) -> tuple[Source, ...]:
    """The sources that `texts` name. Raises UserError for one that is not there or asks for what is ignored.

    cache_dir: where digests of large files are kept, so that an unchanged one is not read for its identity.
    """
    specs = [replace(parse_source(text), traces=traces) for text in texts]
    for spec in specs:
        if traces and (spec.prompt or spec.all_turns or spec.tools != "tools"):
            raise UserError(
                f"{spec.location} are traces, which are read without ?prompt=, ?tools= and ?turns=; "
                "leave them out"
            )
        if spec.prompt and spec.messages:
            raise UserError(f"{spec.location} has both ?prompt= and ?messages=; keep the one that is asked")
        if specs.count(spec) > 1:
            raise UserError(f"{spec.location} is named twice; give it a weight instead")
    names = [spec.name for spec in specs]
    prefixes = [""] if len(specs) == 1 else _prefixes(names)
    return tuple(_open(spec, prefix, cache_dir) for spec, prefix in zip(specs, prefixes, strict=True))


def _prefixes(names: Sequence[str]) -> list[str]:
    """A name for each source that no other has; those that share one are numbered past all real names."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}-{i}" for i in count(1))
        free = (n for n in numbered if n not in names and n not in found)
        found.append(name if names.count(name) == 1 else next(free))
    return found


def _prefixed(prompt: Prompt, prefix: str) -> Prompt:
    if prompt.id.startswith(f"{prefix}/"):
        return prompt
    return replace(prompt, id=f"{prefix}/{prompt.id}")


def _open(spec: SourceSpec, prefix: str, cache_dir: Path | None) -> Source:
    path = spec.path
    if not spec.is_here:
        if spec.location.startswith((".", "/", "~")) or not HUB_ID.fullmatch(spec.location):
            what = "trace" if spec.traces else "prompt"
            several = ", and repeat the flag for several sources" if "," in spec.location else ""
            raise UserError(f"there is no {what} file {spec.location}; check the path{several}")
        return Source(spec, None, resolved_revision(spec), prefix)
    if path.is_file() or not path.is_dir():
        if spec.config or spec.split:
            raise UserError(f"{spec.location} is a file and has neither config nor split; leave them out")
        seen = look([path])
        return Source(spec, (path,), _digest(path, cache_dir), prefix, seen)
    through_datasets = bool(spec.config or spec.split)
    files = _all_files(path) if through_datasets else known_files(path)
    seen = look(files)
    listing = [[_encodable(str(file.relative_to(path))), _digest(file, cache_dir)] for file in files]
    return Source(spec, None if through_datasets else tuple(files), _of_listing(listing), prefix, seen)


def _all_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _encodable(name: str) -> str:
    """`name` if it is text. Raises UserError."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"the file name {name!a} is not UTF-8; rename the file") from None
    return name


def _of_listing(listing: list[list[str]]) -> str:
    return fingerprint(listing)


def _digest(path: Path, cache_dir: Path | None) -> str:
    """sha256 of a file, looked up while the file has not changed."""
    try:
        if not path.is_file():
            raise UserError(f"{shown(str(path))} is no regular file; write the prompts to one")
        if cache_dir is None or path.stat().st_size < _SMALL_BYTES:
            return file_sha256(path)
        before = signature([path])
        cached = cache_file(cache_dir, path)
        known = load_digests(cached, before)
        if known is None:
            known = {path.name: file_sha256(path)}
            _keep(cached, before, known)
        return known[path.name]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its rights") from None


def _keep(cached: Path, files: dict[str, list[int]], digests: dict[str, str]) -> None:
    try:
        store_digests(cached, files, digests)
    except OSError:
        return  # costs the reading next time, and no more
