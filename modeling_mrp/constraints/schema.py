"""JSON schemas, checked and rewritten for outlines-core. That library ignores the keywords that it
does not know; here, each keyword is either followed or refused with an error that names it."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .patterns import byte_automaton, pattern_of

# A private-use character that marks where JSON allows white space; no schema may contain it.
_SPACE = "\ue000"
# Keywords that do not restrict values.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
_ANNOTATIONS |= {"writeOnly", "$comment", "$schema", "$defs", "definitions"}
# By keyword that defines a value, the keywords that may occur together with it.
_BESIDE = {"$ref": set(), "const": {"type"}, "enum": {"type"}, "anyOf": set(), "allOf": set()}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_SCALARS = [{"type": name} for name in ("string", "number", "boolean", "null")]
_PYTHON_TYPES: dict[str, Any] = {
    "string": str,
    "array": list,
    "object": dict,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": None,
}


def schema_pattern(schema: Mapping[str, Any] | str) -> str:
    """Return a regex that matches the values of a JSON schema (draft 2020-12), written as
    `json.dumps` writes them.

    An object has its properties in the order of the schema and, if the schema names any, no other
    properties. A schema without restrictions (`{}`) allows arrays and objects, but none that hold
    further arrays or objects. Each reference is replaced by the schema to which it refers, so a
    schema that refers to itself is refused.

    Raises:
        ImportError: if outlines-core is not installed.
        ValueError: if the schema has a keyword that is not supported or that a pattern cannot
            express; the message gives the keyword and its place.
    """
    root = json.loads(schema) if isinstance(schema, str) else schema
    if _SPACE in json.dumps(root, ensure_ascii=False):
        raise ValueError("it holds the private-use character U+E000: write another")
    pattern = pattern_of(Checker(root).checked(root, "#"), _SPACE)
    for spaced, written in (
        (f"{_SPACE}:{_SPACE}", ": "),
        (f"{_SPACE},{_SPACE}", ", "),
        (f",{_SPACE}", ", "),
        (_SPACE, ""),
    ):
        pattern = pattern.replace(spaced, written)
    return pattern


class Checker:
    """Checks a schema and the schemas nested in it, and rewrites them for outlines-core.

    Args:
        root: The whole schema, in which references are looked up.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.open_refs: list[str] = []

    def checked(self, schema: Any, path: str) -> dict[str, Any]:
        """Return a schema, rewritten for outlines-core.

        Args:
            schema: The whole schema, or a schema nested in it.
            path: The place of `schema` in the whole schema, such as "#/properties/name"; the whole
                schema is at "#". Error messages give this place.

        Raises:
            ValueError: if anything in the schema is refused.
        """
        if not isinstance(schema, Mapping):
            raise ValueError(f"{path} is {schema!r}: give an object that says what is wanted")
        keywords = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if path == "#":
            keywords.pop("$id", None)
        for name, beside in _BESIDE.items():
            if name in keywords:
                self.only(keywords, {name, *beside}, path)
                return self.checked_choice(name, keywords, path)
        if "properties" in keywords:
            keywords.setdefault("type", "object")
        kind = keywords.get("type")
        if isinstance(kind, list):
            self.only(keywords, {"type"}, path)
            kinds = [self.checked({"type": name}, f"{path}/type") for name in kind]
            return {"anyOf": kinds}
        if kind is None:
            self.only(keywords, set(), path)
            # outlines-core writes the alternatives of {} without the necessary parentheses, and
            # takes a minute to make an automaton of arrays and objects of any depth
            nested = {"anyOf": _SCALARS}
            array = {"type": "array", "items": nested}
            return {"anyOf": [*_SCALARS, array, {"type": "object", "additionalProperties": nested}]}
        if kind not in _OF_TYPE:
            raise ValueError(f"type is {kind!r} at {path}: use one of {', '.join(_OF_TYPE)}")
        self.only(keywords, {"type", *_OF_TYPE[kind]}, path)
        if kind == "string":
            return self.checked_string(keywords, path)
        if kind == "array":
            return self.checked_array(keywords, path)
        if kind == "object":
            return self.checked_object(keywords, path)
        return {"type": kind}

    def only(self, keywords: Mapping[str, Any], known: set[str], path: str) -> None:
        """Raise `ValueError` if the schema at `path` has a keyword that is not among the `known`
        ones."""
        for name in keywords:
            if name not in known:
                self.refuse(name, path)

    def refuse(self, name: str, path: str, why: str = "not supported there") -> NoReturn:
        """Raise `ValueError` for the keyword `name` of the schema at `path`; `why` completes the
        message."""
        raise ValueError(f"{name} at {path} is {why}: leave it out, and check the value itself")

    def checked_choice(self, name: str, keywords: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a schema that has the keyword `name`, rewritten for outlines-core.

        Args:
            name: "$ref", "const", "enum", "anyOf" or "allOf".
            keywords: The schema without annotations.
            path: The place of the schema in the whole schema, for messages.
        """
        value = keywords[name]
        if name == "$ref":
            return self.referred(value, path)
        if name in ("const", "enum"):
            values = [value] if name == "const" else value
            if not values:
                self.refuse(name, path, "empty")
            if not all(self.has_type(value, keywords.get("type")) for value in values):
                self.refuse(name, path, "of another type")
            return {"enum": values}
        if name == "allOf" and len(value) > 1:
            self.refuse(name, path, "of several schemas, all of which hold")
        parts = []
        for index, part in enumerate(value):
            parts.append(self.checked(part, f"{path}/{name}/{index}"))
        return {"anyOf": parts}

    def has_type(self, value: Any, kind: Any) -> bool:
        """Return whether a JSON value has the type that a schema gives as `kind`: the name of a
        type, a list of such names, or None for any type."""
        if isinstance(kind, list):
            return any(self.has_type(value, name) for name in kind)
        expected = _PYTHON_TYPES.get(kind, object)
        if isinstance(value, bool):
            return expected in (bool, object)
        return value is None if expected is None else isinstance(value, expected)

    def referred(self, ref: Any, path: str) -> dict[str, Any]:
        """Return the schema to which a reference refers, rewritten for outlines-core.

        Args:
            ref: The value of "$ref", such as "#/$defs/name". A reference of another form, to
                nothing, or that leads back to itself raises `ValueError`.
            path: The place of the reference in the whole schema, for messages.
        """
        if not isinstance(ref, str) or not ref.startswith("#/") or {*ref} & {*"~%"}:
            self.refuse("$ref", path, f"{ref!r}, and not '#/' with names behind it")
        if ref in self.open_refs:
            self.refuse("$ref", path, f"{ref!r}, which refers to itself without end")
        target = self.root
        for name in ref[2:].split("/"):
            if not isinstance(target, Mapping) or name not in target:
                self.refuse("$ref", path, f"{ref!r}, which is not there")
            target = target[name]
        self.open_refs.append(ref)
        schema = self.checked(target, ref)
        self.open_refs.pop()
        return schema

    def checked_string(self, keywords: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema of a string, rewritten for outlines-core. A `format` is replaced by its
        pattern. A pattern is refused if it allows characters that JSON has to escape."""
        for name in ("pattern", "format"):
            if name not in keywords:
                continue
            self.only(keywords, {"type", name}, path)
            if name == "pattern":
                pattern = keywords[name].removeprefix("^").removesuffix("$")
            else:
                quoted = pattern_of({"type": "string", "format": keywords[name]}, "")
                pattern = quoted.strip('"').replace(r"\d", "[0-9]")
            letters = byte_automaton(pattern).next_state >= 0
            if letters[:, [*range(32), *b'"\\']].any():
                self.refuse(name, path, "of texts with quotes, backslashes or control characters")
            return {"type": "string", "pattern": f"^(?:{pattern})$"}
        return keywords

    def checked_array(self, keywords: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema of an array, rewritten for outlines-core together with the schemas of
        its items: one schema for all items or, with `prefixItems`, one for each item of an array of
        fixed length."""
        if "prefixItems" in keywords:
            self.only(keywords, {"type", "prefixItems", "items"}, path)
            items = []
            for index, item in enumerate(keywords["prefixItems"]):
                items.append(self.checked(item, f"{path}/prefixItems/{index}"))
            return {"type": "array", "prefixItems": items}
        if "items" in keywords:
            items_schema = {} if keywords["items"] is True else keywords["items"]
            keywords["items"] = self.checked(items_schema, f"{path}/items")
        return keywords

    def checked_object(self, keywords: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema of an object, rewritten for outlines-core together with the schemas of
        its properties or, if the property names are arbitrary, with the schema of their values."""
        properties = keywords.get("properties") or {}
        required = keywords.get("required", [])
        for name in required:
            if name not in properties:
                self.refuse("required", path, f"of {name!r}, which properties does not have")
        others = keywords.get("additionalProperties", True)
        if properties:
            checked = {}
            for name, schema in properties.items():
                if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                    self.refuse("properties", path, f"of {name!r}, which JSON has to escape")
                checked[name] = self.checked(schema, f"{path}/properties/{name}")
            return {"type": "object", "properties": checked, "required": required}
        if others is False:
            return {"enum": [{}]}
        if others is True:
            return {"type": "object"}
        others = self.checked(others, f"{path}/additionalProperties")
        return {"type": "object", "additionalProperties": others}
