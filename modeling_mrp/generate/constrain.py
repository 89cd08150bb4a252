"""The languages of rows: which new texts the options `regex`, `choices`, `json_schema` and
`grammar` allow in each row."""

from collections.abc import Sequence
from typing import Any

from ..constraints.languages import Language, Vocabulary, language_of, languages_of
from .option_table import CONSTRAINTS


def languages_by_row(
    options: Any, tokenizer: Any, rows: int, vocab_size: int, mask_id: int
) -> list[Language | None]:
    """Make the language of each prompt's new text from the options `regex`, `choices`,
    `json_schema` and `grammar`. It is None for a prompt that has none of them.

    Args:
        options: An `MRPGenerationConfig`.
        tokenizer: The tokenizer of the model.
        rows: The number of prompts.
        vocab_size, mask_id: Vocabulary size and mask id of the model.

    Raises:
        ImportError: if a language needs a library that is not installed.
        ValueError: if the value of one of these options is invalid or cannot be enforced, if a
            prompt has two of them, or if there is no tokenizer or no eos.
    """
    languages: list[Language | None] = [None] * rows
    names: list[str | None] = [None] * rows
    eos = tuple(options.eos_ids())
    for name in CONSTRAINTS:
        value = getattr(options, name)
        if value is None:
            continue
        if not hasattr(tokenizer, "get_vocab"):
            raise ValueError(
                f"{name} needs the tokenizer: pass tokenizer=... to generate, not {tokenizer!r}"
            )
        if not eos:
            raise ValueError(f"{name} needs an eos, which ends the text: set eos_token_id")
        known = languages_of(tokenizer, Vocabulary(vocab_size, mask_id, eos))
        for row, row_value in enumerate(values_by_row(name, value, rows)):
            if row_value is None:
                continue
            if names[row] is not None:
                raise ValueError(
                    f"row {row} has {names[row]} and {name}: give one of them, and None in the "
                    "list of the other"
                )
            names[row] = name
            languages[row] = language_of(known, name, row_value)
    return languages


def values_by_row(name: str, value: Any, rows: int) -> Sequence[Any]:
    """Return the value of the option `name` for each of `rows` prompts. `value` is one value for
    all prompts, or a list with one value per prompt; a list of strings under "choices" is one
    value. Raise `ValueError` for a list of another length."""
    is_choices = name == "choices" and all(isinstance(choice, str) for choice in value)
    if is_choices or not isinstance(value, list | tuple):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(
            f"{name} has {len(value)} values for {rows} prompts: give one for all, or a list of "
            "one per prompt"
        )
    return value


def response_options(response_format: dict[str, Any] | None) -> dict[str, Any]:
    """Translate OpenAI's `response_format` into the option `json_schema` of `generate`.

    Args:
        response_format: None, or a dict whose `type` is "text", "json_object" or "json_schema".

    Returns:
        A dict of options: empty for None and "text"; for "json_object", the `json_schema` of any
        object; for "json_schema", the one in `response_format["json_schema"]["schema"]`.

    Raises:
        ValueError: for any other format.
    """
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    described = (response_format or {}).get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict) or "schema" not in described:
        raise ValueError(
            f"response_format is {response_format!r}: its type must be text, json_object, or "
            "json_schema with a schema in its json_schema"
        )
    return {"json_schema": described["schema"]}
