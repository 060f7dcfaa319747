"""What vLLM makes of a chat request before it renders the template: content format, tool call arguments, tools."""
import json
import re

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes


def loops_over_content(template):
    """vLLM's rule for the content format, on the template's syntax tree."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    tree = env.parse(re.sub(r"\{%[-+]? *(end)?generation *[-+]?%\}", "", template))

    def about(node, name, key=None):
        if isinstance(node, (nodes.Filter, nodes.Test)):
            return node.node is not None and about(node.node, name, key)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return about(node.node, name, key)
        if key is None:
            return isinstance(node, nodes.Name) and node.name == name
        if isinstance(node, nodes.Getitem):
            return about(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        return isinstance(node, nodes.Getattr) and about(node.node, name) and node.attr == key

    lists, queue = {"messages"}, ["messages"]
    while queue:
        known = queue.pop()
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and about(assign.node, known) and assign.target.name not in lists:
                lists.add(assign.target.name)
                queue.append(assign.target.name)
    fors = list(tree.find_all(nodes.For))
    items = [f.target.name for f in fors if isinstance(f.target, nodes.Name) and any(about(f.iter, n) for n in lists)]
    return any(about(f.iter, item, "content") for f in fors for item in items)


def texts(content, system):
    out = []
    for part in [] if content is None else [content] if isinstance(content, str) else content:
        text = part if isinstance(part, str) else part.get(
            {"refusal": "refusal", "thinking": "thinking"}.get(part["type"], "text"))
        if system and text is not None and text.startswith("x-anthropic-billing-header"):
            text = text.partition("\n")[2] or None
        if text is not None:
            out.append(text)
    return out


def arguments_of(function):
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        read = None
    return read if isinstance(read, dict) else {}


def shape_message(message, parts_wanted):
    role, said = message["role"], texts(message.get("content"), message["role"] == "system")
    if parts_wanted and role != "tool":
        content = [{"type": "text", "text": text} for text in said]
    else:
        content = "\n".join(text for text in said if text or parts_wanted)
    shaped = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            shaped["tool_calls"] = [
                {"id": call["id"], "function": {"arguments": arguments_of(call["function"]),
                                                "name": call["function"]["name"]}, "type": call["type"]}
                for call in message["tool_calls"]]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        shaped["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        shaped["name"] = message["name"]
    return shaped


def shape_tool(tool):
    function, deferred = tool["function"], tool.get("defer_loading")
    shaped = {key: function.get(key) for key in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    shaped.update({key: value for key, value in optional.items() if value is not None})
    return {"type": tool.get("type", "function"), "function": shaped,
            **({} if deferred is None else {"defer_loading": deferred})}
