"""A configuration model's fields as people meet them: dotted name, flag, allowed values in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text that is not empty",
    Path: "a path",
    bool: "true or false",
}

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""How a constraint reads, by the attribute that pydantic's metadata keeps it in."""


@dataclass(frozen=True)
class ConfigField:
    """One leaf of a nested model."""

    path: tuple[str, ...]
    """Section (if any) and field: `("train", "steps")`."""
    info: FieldInfo
    type: Any
    """The annotation without `None`."""

    @property
    def name(self) -> str:
        """As TOML spells it: `train.learning_rate`."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """As the command line spells it: `--train.learning-rate`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Whether several values are given: joined by commas, or as `repeats` says."""
        return get_origin(self.type) is tuple

    @property
    def repeats(self) -> bool:
        """Whether several values are given by repeating the flag: texts may have commas in them."""
        return self.is_list and get_args(self.type)[0] is str

    @property
    def choices(self) -> tuple[str, ...]:
        """The words allowed, if they are listed."""
        inner = get_args(self.type)[0] if self.is_list else self.type
        return get_args(inner) if get_origin(inner) is Literal else ()

    @property
    def bounds(self) -> str:
        """The limits, in words: `>= 0 and < 1`; nothing where there are none."""
        return " and ".join(_bounds(self.info))

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}" + (",..." if self.is_list else "")
        if given := self._said("metavar"):
            return given
        if self.repeats:
            return "SOURCE"
        return "INT,INT,..." if self.is_list else _METAVARS[self.type]

    def allowed(self) -> str:
        """The values allowed, in words: `a whole number >= 1`, `one of auto, cpu, cuda`."""
        if form := self._said("form"):
            return form
        if self.repeats:
            return "a path or a hub id, and several by repeating the flag"
        if self.is_list:
            words = f"of {', '.join(self.choices)}" if self.choices else "whole numbers"
            return f"one or more {words}, joined by commas"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"{_KINDS[self.type]} {self.bounds}".strip()

    def default(self) -> str:
        """The default in words, or nothing where the docstring says what unset means."""
        value, text = self.info.default, self.info.description or ""
        if self.info.is_required():
            return "required"
        if value is None:
            return "" if "unset:" in text else "default: auto"
        if value == ():
            return "" if "unset:" in text else "default: none"
        if isinstance(value, float):
            return f"default: {value:g}"
        return f"default: {str(value).lower() if isinstance(value, bool) else value}"

    def _said(self, key: str) -> str | None:
        """What the field itself says: its `metavar`, or in words the `form` that its pattern asks for."""
        extra = self.info.json_schema_extra
        said = extra.get(key) if isinstance(extra, dict) else None
        return said if isinstance(said, str) else None


def config_fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[ConfigField]:
    """The leaves of `model` in their order; nested models are sections."""
    for name, info in model.model_fields.items():
        annotation = _without_none(info.annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from config_fields(annotation, (*path, name))
        else:
            yield ConfigField((*path, name), info, annotation)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        kept = [a for a in get_args(annotation) if a is not NoneType]
        assert len(kept) == 1, f"{annotation} is not one type and None"
        return kept[0]
    return annotation


def _bounds(info: FieldInfo) -> Iterator[str]:
    for constraint in info.metadata:
        for attribute, words in _BOUNDS.items():
            if (limit := getattr(constraint, attribute, None)) is not None:
                yield f"{words} {f'{limit:g}' if isinstance(limit, float) else limit}"
