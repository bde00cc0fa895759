"""A scenario's faults as TOML and back; strict, and every error names the field that is wrong."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from simulator.faults import KINDS, NAMES, Fault, When

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def parse(kind: type[T], text: str) -> T:
    """The value of the dataclass `kind` that `text` describes; raises `ValueError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from error
    return _table_as(kind, table, "")


def written(value: Any) -> str:
    """The dataclass `value` as TOML: what `parse` reads, without what is left at its default."""
    lines, tables = [], []
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name == "faults":
            tables = [_fault_text(fault) for fault in part]
        elif part != field.default:
            lines.append(f"{field.name} = {_value_text(part)}")
    return "\n".join([*lines, *tables]) + "\n"


def _fault_text(fault: Fault) -> str:
    lines = [
        f"{field.name} = {_value_text(getattr(fault, field.name))}"
        for field in dataclasses.fields(fault)
        if getattr(fault, field.name) != field.default
    ]
    return "\n".join(["", "[[faults]]", f'kind = "{NAMES[type(fault)]}"', *lines])


def _value_text(value: Any) -> str:
    if isinstance(value, When):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        known = {f.name: f.default for f in dataclasses.fields(value)}
        return f"{{ {', '.join(f'{n} = {_value_text(v)}' for n, v in fields.items() if v != known[n])} }}"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _table_as(kind: type[T], table: Any, where: str) -> T:
    """A table with exactly the fields of `kind`, of the right types."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: {table!r} is not a table")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in fields:
            raise ValueError(f"{_joined(where, name)}: unknown; there are {', '.join(fields)}")
        values[name] = _value_as(hints[name], value, _joined(where, name))
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"{_joined(where, name)}: missing")
    return kind(**values)


def _value_as(hint: Any, value: Any, where: str) -> Any:
    if hint == tuple[Fault, ...]:
        entries = _list_of(value, where)
        return tuple(_fault_of(entry, f"{where}[{index}]") for index, entry in enumerate(entries))
    if isinstance(hint, types.UnionType):
        options = typing.get_args(hint)
        if When in options and isinstance(value, Mapping):
            return _table_as(When, value, where)
        return _value_as(next(o for o in options if o not in (type(None), When)), value, where)
    if typing.get_origin(hint) is tuple:
        entries, inner = _list_of(value, where), typing.get_args(hint)[0]
        return tuple(_value_as(inner, entry, f"{where}[{index}]") for index, entry in enumerate(entries))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ValueError(f"{where}: {value!r} is not {names[hint]}")
    return value


def _fault_of(table: Any, where: str) -> Fault:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: {table!r} is not a table")
    name = table.get("kind")
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"{where}.kind: {name!r} is none of {', '.join(KINDS)}")
    return _table_as(KINDS[name], {key: value for key, value in table.items() if key != "kind"}, where)


def _list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {value!r} is not a list")
    return value


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
