"""What vLLM makes of a chat request before it renders the template: content format, tool call arguments, tools."""
import copy
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


def shape_message(message, parts_wanted):
    content = message.get("content")
    parts = [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part)
            continue
        text = part.get({"refusal": "refusal", "thinking": "thinking"}.get(part["type"], "text"))
        if text is not None:
            out.append({"type": "text", "text": text} if parts_wanted else text)
    out = [part for part in out if part]
    shaped = {"role": message["role"], "content": out if parts_wanted else "\n".join(out)}
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            shaped["tool_calls"] = copy.deepcopy(message["tool_calls"])
            for call in shaped["tool_calls"]:
                arguments = call["function"].get("arguments")
                if isinstance(arguments, str) and arguments:
                    arguments = json.loads(arguments)
                call["function"]["arguments"] = arguments or {}
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    if message["role"] == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shaped["name"] = message["name"]
    return shaped


def shape_tool(tool):
    function = tool["function"]
    declared = {key: function.get(key) for key in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": {**declared, **function}, **
            {key: value for key, value in tool.items() if key not in ("type", "function")}}
