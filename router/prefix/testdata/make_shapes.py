#!/usr/bin/env python3
"""Make shapes.json: what vLLM makes of chat, messages and responses bodies, printed by the two echo templates.

Run with the Python of an environment that holds vLLM 0.32 (tests/engines/install makes one): its own code converts.
"""
import json
import os
from types import SimpleNamespace

import jinja2
from pydantic import ValidationError
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False, hf_config=SimpleNamespace(model_type="none"))
REFUSALS = (jinja2.TemplateError, ValidationError, VLLMValidationError, ValueError, TypeError, KeyError, LookupError,
            AttributeError)
EFFORTS = ["low", "medium", "high", "xhigh", "max"]


class Echo:
    def __init__(self, name, content_format):
        self.name, self.format = name, content_format
        self.template = open(os.path.join(HERE, "models", name, "chat_template.jinja")).read()
        self.merges = AnthropicServingMessages._detect_merge_inline_system(self.template)
        none = self.effort("none")
        self.disabled = "low" if any(self.effort(effort) == none for effort in EFFORTS) else "none"

    def effort(self, effort):
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        return self.chat(ChatCompletionRequest.model_validate(body))

    def render(self, request, messages, tools):
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        conversation, _, _ = parse_chat_messages(messages, CONFIG, self.format)
        texts, _ = render_jinja_template([conversation], tools=tools, chat_template=self.template, **kwargs)
        return texts[0]

    def chat(self, request):
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        return self.render(request, request.messages, tools)

    def messages(self, body):
        return self.chat(AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(body), merge_inline_system=self.merges,
            disabled_thinking_effort=self.disabled))

    def responses(self, body):
        request = ResponsesRequest.model_validate(body)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        return self.render(request, messages, construct_tool_dicts(request.tools, request.tool_choice))

    def shown(self, endpoint, body):
        body = json.loads(json.dumps(body))  # the models change what they validate
        if endpoint == "chat":
            return self.chat(ChatCompletionRequest.model_validate(body))
        return getattr(self, endpoint)(body)


def main():
    bodies = json.load(open(os.path.join(HERE, "bodies.json")))
    chats = json.load(open(os.path.join(HERE, "conversations.json")))["chats"]
    bodies["chat"] += [{"name": chat["name"], "body": chat["body"]} for chat in chats]
    cases = []
    for echo in (Echo("echo_text", "string"), Echo("echo_parts", "openai")):
        for endpoint, named in bodies.items():
            for entry in named:
                case = {"template": echo.name, "endpoint": endpoint, "body": entry["body"]}
                try:
                    case["text"] = echo.shown(endpoint, entry["body"])
                except REFUSALS as error:
                    case["error"] = f"{entry['name']}: {type(error).__name__}: {error}"[:160]
                cases.append(case)
    with open(os.path.join(HERE, "shapes.json"), "w", encoding="utf-8") as out:
        json.dump(cases, out, ensure_ascii=False, separators=(",", ":"))
        out.write("\n")


main()
