"""The configuration's keys as data: the JSON Schema for editors and the table in docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from qmflask.config.decode import inner_section
from qmflask.config.schema import RootSection, Section
from qmflask.config.units import gib, show_duration

_HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "qmflask configuration",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file: its dotted path (`models.*.ttl`), type, default, meaning and example, all as text."""

    path: str
    type: str
    default: str
    meaning: str
    example: str
    ours: bool


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors; null is allowed wherever it means absent."""
    schema = RootSection.model_json_schema(by_alias=True, mode="validation")
    definitions = schema.pop("$defs", {})
    for section in [schema, *definitions.values()]:
        _loosen(section)
    root = {**_HEAD, **{name: value for name, value in schema.items() if name != "title"}}
    root["patternProperties"] = {"^x-": {}}
    return {**root, "$defs": definitions}


def _loosen(section: dict[str, Any]) -> None:
    """Unknown keys are marked in the editor, null is not, nor is a macro or variable in place of a number."""
    for option in section.get("anyOf", [section]):
        properties = option.get("properties")
        if properties is None:
            continue
        option["additionalProperties"] = False
        for name, value in properties.items():
            properties[name] = _or_reference(value)


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    kind = str(value.get("x-type", ""))
    if "default" in value:
        value["default"] = _as_written(kind, value["default"])
    described: dict[str, Any] = {name: value[name] for name in ("description", "default", "examples", "x-ours") if name in value}
    inner = {name: part for name, part in value.items() if name not in described and name != "title"}
    others: list[dict[str, Any]] = [{"type": "null"}]
    if inner.get("type") not in ("object", "array") and "$ref" not in inner:
        others.append({"type": "string", "pattern": r"\$\{[A-Za-z0-9_.-]+\}"})
    return {**described, "anyOf": [inner, *others]} if inner and inner != {"x-type": "any value"} else described


def keys(section: type[Section] = RootSection, prefix: str = "") -> Iterator[Key]:
    """Every key of the file, parents before children, in the order of the schema."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        inner, how = inner_section(info.annotation)
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        yield Key(path, _type(info), _default(info), info.description or "", _example(info), bool(extra.get("x-ours")))
        if inner is not None and not _repeats(path):
            yield from keys(inner, path + {"map": ".*.", "list": "[].", "one": "."}[how])


def _repeats(path: str) -> bool:
    """Sections that stand in two places are listed once, at the first."""
    return path in ("routing.router.settings.groups", "routing.router.settings.matrix")


def _type(info: FieldInfo) -> str:
    inner, how = inner_section(info.annotation)
    if inner is not None:
        return {"one": "mapping", "map": "mapping of mappings", "list": "list of text or mappings"}[how]
    parts = (info.annotation, *info.metadata)
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[parts] if info.metadata else info.annotation)  # type: ignore
    return _shown_type(adapter.json_schema())


def _shown_type(schema: dict[str, Any]) -> str:
    if "x-type" in schema:
        return str(schema["x-type"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return _shown_type(next(part for part in schema["anyOf"] if part.get("type") != "null"))
    if schema.get("type") == "array":
        return f"list of {_shown_type(schema['items'])}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"mapping to {_shown_type(inner)}" if isinstance(inner, dict) else "mapping"
    return str(schema.get("type", "any value"))


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None or isinstance(value, Section):
        return ""
    value = _as_written(_type(info), value)
    if value in ("", [], {}):
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _as_written(kind: str, value: Any) -> Any:
    """A default as the file would say it: sizes in GiB, durations with a unit."""
    if kind == "size":
        return gib(value)
    return show_duration(value) if kind == "duration with unit" else value


def _example(info: FieldInfo) -> str:
    value = (info.examples or [None])[0]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table() -> str:
    """The Markdown table of all keys; those that llama-swap does not know are marked with a star."""
    lines = ["| key | type | default | meaning | example |", "| --- | --- | --- | --- | --- |"]
    for key in keys():
        star = " ★" if key.ours else ""
        cells = [f"`{key.path}`{star}", key.type, _code(key.default), key.meaning, _code(key.example)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
