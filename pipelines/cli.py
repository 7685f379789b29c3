"""From a pydantic model to a command line: every field a flag, a TOML file, errors that say the remedy.

Parsing never imports more than pydantic, so that `--help` answers at once. What a field means stands in
its docstring (`pipelines.config`); how fields are named and described, in `pipelines.fields`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dflash_core.errors import DFlashError, ExitCode, UserError
from pipelines.fields import ConfigField, config_fields
from pipelines.openmp import spin_briefly

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

M = TypeVar("M", bound=BaseModel)

_Extra = Callable[[argparse.ArgumentParser], None]


def parse(
    model: type[M], argv: Sequence[str], *, description: str, extra: _Extra | None = None
) -> tuple[M, argparse.Namespace]:
    """`argv` and the TOML file it names as a `model`, and the job's own flags that `extra` adds.

    Flags override the file; dashes and underscores are the same in a flag. Raises UserError for
    anything that cannot be used, and SystemExit after `--help`.
    """
    fields = list(config_fields(model))
    parser = _parser(fields, description, extra)
    options, unknown = parser.parse_known_args([_dashed(word) for word in argv])
    if unknown:
        raise UserError(_unknown_argument(unknown[0], parser))
    given = {field.path: value for field in fields if (value := vars(options).pop(field.name)) is not None}
    file = options.config
    data = _read_toml(file) if file else {}
    for path, value in given.items():
        _put(data, path, value)
    try:
        return model.model_validate(data), options
    except ValidationError as error:
        raise UserError(_explain(error, fields, given, file)) from None


def run_job(
    main: Callable[[list[str]], int],
    argv: Sequence[str] | None = None,
    *,
    after_interrupt: str = "run the same command again to continue",
) -> NoReturn:
    """Run a job's `main` on `argv` (default: the process's) and exit as `ExitCode` says.

    A DFlashError is one line on stderr; Ctrl-C exits 130; anything else is our own fault and keeps its
    traceback.
    """
    spin_briefly()
    try:
        code = main(list(sys.argv[1:] if argv is None else argv))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print(f"interrupted; {after_interrupt}", file=sys.stderr)
        code = INTERRUPTED
    except Exception:  # noqa: BLE001 - the last resort of a process
        traceback.print_exc()
        code = ExitCode.INTERNAL
    sys.exit(int(code))


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def _parser(fields: Sequence[ConfigField], description: str, extra: _Extra | None) -> _Parser:
    required = "".join(f" {field.flag} {field.metavar}" for field in fields if field.info.is_required())
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Relative paths, in flags and in the TOML file alike, are relative to the working directory.",
        usage=f"%(prog)s{required} [--config FILE] [--FLAG VALUE ...]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; flags override it")
    if extra is not None:
        extra(parser)
    groups: dict[tuple[str, ...], Any] = {(): parser}
    for field in fields:
        section = field.path[:-1]
        if section not in groups:
            groups[section] = parser.add_argument_group(".".join(section))
        _add_flag(groups[section], field)
    return parser


def _add_flag(group: Any, field: ConfigField) -> None:
    notes = "; ".join(filter(None, [field.bounds, field.default()]))
    text = field.info.description or ""
    text = (f"{text} ({notes})" if notes else text).replace("%", "%%")
    if field.type is bool:
        group.add_argument(
            field.flag, dest=field.name, help=text, default=None, action=argparse.BooleanOptionalAction
        )
    elif field.repeats:
        group.add_argument(field.flag, dest=field.name, help=text, action="append", metavar=field.metavar)
    else:
        value = _split if field.is_list else str
        group.add_argument(field.flag, dest=field.name, help=text, type=value, metavar=field.metavar)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _dashed(word: str) -> str:
    """A flag with its underscores as dashes; values stay as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _unknown_argument(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word!r} belongs to no flag; name the flag before it, see --help"
    known = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
    return f"unknown flag {word.partition('=')[0]}; {_did_you_mean(word.partition('=')[0], known)}"


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    """The nearest of `known` as a question: a full name, or one whose last part is alike."""
    by_last = {name.rpartition(".")[2].lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or [
        by_last[last]
        for last in difflib.get_close_matches(word.rpartition(".")[2].lstrip("-"), by_last, n=1, cutoff=0.75)
    ]
    return f"did you mean {near[0]}?" if near else "see --help for those there are"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read ({error.strerror}); pass a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}; mend that line") from None


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for section in path[:-1]:
        inner = data.setdefault(section, {})
        if not isinstance(inner, dict):  # the file says `train = 3`: validation will name it
            return
        data = inner
    data[path[-1]] = value


def _explain(
    error: ValidationError, fields: list[ConfigField], given: dict[tuple[str, ...], Any], file: Path | None
) -> str:
    """The first mistake in one sentence, and how many others there are."""
    details = error.errors(include_url=False)
    others = {detail["loc"][:2] for detail in details} - {details[0]["loc"][:2]}
    more = f" ({len(others)} more like this)" if others else ""
    return _explain_one(details[0], fields, given, file) + more


def _explain_one(
    detail: ErrorDetails, fields: list[ConfigField], given: dict[tuple[str, ...], Any], file: Path | None
) -> str:
    location = tuple(str(part) for part in detail["loc"])
    name = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = [f.name for f in fields]
        if name in known:  # `"train.steps" = 3`, one key in quotes
            section, _, key = name.rpartition(".")
            return f"{file} has the key {name!r} in quotes; write {key} below [{section}]"
        sections = {f.name.rpartition(".")[0] for f in fields} - {""}
        return f"{file} has an unknown key {name}; {_did_you_mean(name, [*known, *sorted(sections)])}"
    if cause := detail.get("ctx", {}).get("error"):
        return str(cause)
    field = next((f for f in fields if f.path == location[: len(f.path)]), None)
    if field is None:
        return f"{name} in {file} must be a table; write [{name}] and its keys below"
    if detail["type"] == "missing":
        return f"{field.flag} is missing; pass {field.flag} {field.metavar}"
    place = field.flag if field.path in given else f"{field.name} in {file}"
    value = given.get(field.path, detail["input"])
    text = ",".join(value) if isinstance(value, list) and field.path in given else value
    return f"{place} is {text!r}; pass {field.allowed()}"
