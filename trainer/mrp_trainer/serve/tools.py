"""Tool calls. The chat template writes the declared tools into the prompt. If a call is required,
the text is bound to the language of such calls. Calls in a text are converted into OpenAI's form.

Calls must have the form that the templates of Qwen, and therefore of SDAR, give them: JSON with
`name` and `arguments` between two marks. A template with another form is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from modeling_mrp.constraints.patterns import escaped
from modeling_mrp.constraints.schema import schema_pattern

from .requests import ChatRequest, Tool

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Tools:
    """The tools of a chat.

    Attributes:
        declared: The tools as the request declares them.
        required: The tools from which the model must choose one to call; empty if it may also call
            none.
        several: Whether a text may contain more than one call.
    """

    declared: Sequence[Tool]
    required: Sequence[Tool] = ()
    several: bool = True

    @classmethod
    def of(cls, request: ChatRequest) -> "Tools | None":
        """Return the tools that a request lets the model call; None if there are none.

        Raises:
            ValueError: for a required tool that is not declared.
        """
        choice = request.tool_choice
        if not request.tools or choice == "none":
            if choice not in ("none", "auto"):
                raise ValueError(f"tool_choice is {choice!r}: declare its tools in `tools`")
            return None
        required: Sequence[Tool] = ()
        if choice == "required":
            required = request.tools
        elif not isinstance(choice, str):
            required = [tool for tool in request.tools if tool.name == choice.function.name]
            if not required:
                raise ValueError(
                    f"tool_choice names {choice.function.name!r}, which is none of `tools`"
                )
        return cls(request.tools, required, request.parallel_tool_calls)

    def for_template(self) -> list[dict[str, Any]]:
        """Convert the tools to the form that chat templates take as `tools`."""
        return [tool.model_dump(exclude_none=True) for tool in self.declared]

    def pattern(self) -> str:
        """Return a regex for a text that is a call of one of the required tools, with arguments
        that follow the tool's schema.

        Raises:
            ValueError: for parameters whose schema cannot be enforced.
        """
        calls = []
        for tool in self.required:
            arguments = schema_pattern(tool.function.parameters or {"type": "object"})
            head = escaped(f'{BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": ')
            tail = escaped("}\n" + END)
            calls.append(f"{head}(?:{arguments}){tail}")
        return "|".join(calls)

    def split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split a text into its content and its calls, and return the calls in OpenAI's form.
        Calls are read up to the first one that is malformed, unfinished, or of an undeclared tool;
        the text from there on stays in the content. Unless `several` is set, only the first call is
        read, and the text after it is dropped."""
        names = {tool.name for tool in self.declared}
        content = ""
        calls: list[dict[str, Any]] = []
        while BEGIN in text and (self.several or not calls):
            before, _, behind = text.partition(BEGIN)
            body, end, rest = behind.partition(END)
            call = _call(body, names) if end else None
            if call is None:
                break
            content += before
            calls.append(call)
            text = rest
        if calls and not self.several:
            text = ""
        content += text
        return (content.strip() if calls else content), calls

    @staticmethod
    def certain(text: str) -> int:
        """Return the number of characters that are certainly content: those before anything that
        is, or may become, the beginning of a call."""
        begin = text.find(BEGIN)
        if begin >= 0:
            return begin
        for length in range(min(len(BEGIN) - 1, len(text)), 0, -1):
            if BEGIN.startswith(text[-length:]):
                return len(text) - length
        return len(text)


def _call(body: str, names: set[str]) -> dict[str, Any] | None:
    """Convert the JSON of a call into OpenAI's form; return None if it is invalid, or calls a tool
    that is not among `names`."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("name") not in names:
        return None
    arguments = fields.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {
        "name": fields["name"],
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}
