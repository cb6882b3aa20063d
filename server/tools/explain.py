"""For models whose chat template knows no tools: what the template would have said, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.tools.formats import ToolFormat

Message = Mapping[str, Any]


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[Message]:
    """The messages with the tools, and how to call one, in the system message."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = write_call(tool_format, "<name>", {"<argument>": "<value>"})
    text = (
        "You can call functions. To call one, answer with nothing but its name and arguments in this form:\n"
        f"{form}\n\nThese are the functions, each with a JSON schema of its parameters:\n{functions}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    """The messages with calls as the text that the model wrote, and results in messages of the user.

    The content of a message with calls is a list: what stands at odd places says a client (names and arguments), and
    must not become a marker; what stands at even places is the message's own text, and the format's.
    """
    told: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls:
            names.update((call["id"], call["function"]["name"]) for call in calls)
            content = [message["content"]]
            for call in calls:
                first, *rest = call_parts(tool_format, call["function"]["name"], call["function"]["arguments"])
                content[-1] += f"\n{first}" if any(content) else first
                content += rest
            told.append({name: value for name, value in message.items() if name != "tool_calls"} | {"content": content})
        elif message["role"] == "tool":
            name = names.get(message["tool_call_id"], message.get("name", ""))
            text = f"Result of {name or message['tool_call_id']}: {message['content']}"
            if told and told[-1].get("of_tools"):
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{text}"}
            else:
                told.append({"role": "user", "content": text, "of_tools": True})
        else:
            told.append(message)
    return [{name: value for name, value in message.items() if name != "of_tools"} for message in told]


def write_call(tool_format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the format has it."""
    return "".join(call_parts(tool_format, name, arguments))


def call_parts(tool_format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> list[str]:
    """``write_call`` in parts: at odd places those that hold the name and the arguments, at even ones the format's."""
    opening = tool_format.opening or ""
    if tool_format.named and not tool_format.prefer_list:
        return [opening, name, tool_format.inner[-1], json.dumps(arguments, ensure_ascii=False), ""]
    call = json.dumps({"name": name, tool_format.arguments_key: arguments}, ensure_ascii=False)
    if tool_format.bare:
        return ["", call, ""]
    call = f"[{call}]" if tool_format.prefer_list else call
    return [f"{opening}{tool_format.space}", call, f"{tool_format.space}{tool_format.closing or ''}"]
