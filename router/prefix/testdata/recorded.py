"""Recorded text traces as sessions of OpenAI messages, and the requests that each of their steps sent.

A session is {"traj": messages, "steps": [[places in traj], ...]}; without `steps` there is one before each answer."""
import glob
import gzip
import io
import json
import os
import re
import tarfile

AIRLINE_TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": {
        "type": "object", "properties": {key: {"type": "string", "description": text} for key, text in keys.items()},
        "required": list(keys)}}}
    for name, what, keys in [
        ("get_user_details", "Get the details of a user.", {"user_id": "Such as 'sara_doe_496'."}),
        ("get_reservation_details", "Get a reservation.", {"reservation_id": "Such as '8JX2WO'."}),
        ("calculate", "Result of an expression.", {"expression": "Numbers, + - * / and ( )."})]]
TURN = re.compile(r"^(user|assistant|system): ", re.M)


def steps(session):
    traj = session["traj"]
    if "steps" in session:
        return [[traj[at] for at in step] for step in session["steps"]]
    return [traj[:at] for at in range(1, len(traj)) if traj[at]["role"] == "assistant"]


class Session:
    """Steps whose messages are mostly those of the step before."""

    def __init__(self):
        self.traj, self.steps, self.known = [], [], {}

    def step(self, messages):
        places = []
        for message in messages:
            key = json.dumps(message, sort_keys=True)
            if key not in self.known:
                self.known[key] = len(self.traj)
                self.traj.append(message)
            places.append(self.known[key])
        self.steps.append(places)

    def made(self):
        return {"traj": self.traj, "steps": self.steps}


def tau_bench(folder):
    for path in sorted(glob.glob(os.path.join(folder, "tau_bench", "*.json.gz"))):
        yield from ({"traj": dialogue["traj"]} for dialogue in json.load(gzip.open(path)))


def lmcache(folder):
    """Prompts recorded as one text: turns where it names roles, what was added to the prompt before otherwise."""
    for path in sorted(glob.glob(os.path.join(folder, "*.jsonl.gz"))):
        rows = sorted((json.loads(line) for line in gzip.open(path)), key=lambda row: row["timestamp"])
        session, before, messages = Session(), "", []
        for text in (row["input"] for row in rows if row["input"]):
            pieces = TURN.split(text)
            if len(pieces) > 1:
                messages = [{"role": role, "content": said} for role, said in zip(pieces[1::2], pieces[2::2])]
            elif before and text.startswith(before) and text != before:
                role = "assistant" if messages[-1]["role"] == "user" else "user"
                messages = [*messages, {"role": role, "content": text[len(before):]}]
            else:
                messages = [{"role": "user", "content": text}]
            before = text
            session.step(messages)
        if session.steps:
            yield session.made()


def text_of(content):
    if isinstance(content, str):
        return content
    return "\n".join(block.get("text", "") for block in content or [] if block.get("type") == "text")


def from_claude(record):
    """One transcript record as messages."""
    message, content = record["message"], record["message"]["content"]
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if message["role"] == "user":
        results = [{"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(block.get("content"))}
                   for block in content if block["type"] == "tool_result"]
        said = text_of(content)
        return results + ([{"role": "user", "content": said}] if said or not results else [])
    out = {"role": "assistant", "content": text_of(content)}
    thought = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    if thought:
        out["reasoning"] = thought
    calls = [{"id": block["id"], "type": "function", "function": {
        "name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}}
        for block in content if block["type"] == "tool_use"]
    return [{**out, "tool_calls": calls} if calls else out]


def merged(messages):
    """Records of one answer as one message."""
    out = []
    for message in messages:
        last = out[-1] if out else None
        if last and message["role"] == last["role"] == "assistant":
            last = out[-1] = dict(last)
            last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
            if "reasoning" in message:
                last["reasoning"] = last.get("reasoning", "") + message["reasoning"]
            if "tool_calls" in message:
                last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
        else:
            out.append(message)
    return out


def claude_code(folder):
    for path in sorted(glob.glob(os.path.join(folder, "*.tar.xz"))):
        with tarfile.open(path) as archive:
            for member in archive:
                if not member.name.endswith(".jsonl"):
                    continue
                lines = io.TextIOWrapper(archive.extractfile(member), encoding="utf-8")
                records = [record for record in map(json.loads, lines) if record.get("type") in ("user", "assistant")]
                session, seen, so_far = Session(), set(), []
                for record in records:
                    key = record["message"].get("id")
                    if record["type"] == "assistant" and so_far and key not in seen:
                        seen.add(key)
                        session.step(merged(so_far))
                    so_far += from_claude(record)
                if session.steps:
                    yield session.made()


def text_traces(source):
    """(name, sessions, whether they are long) of all text traces in a folder."""
    folder = os.path.join(source, "dev") if os.path.isdir(os.path.join(source, "dev")) else source
    yield "tau_bench", list(tau_bench(folder)), False
    for name in ("lmcache_magagent", "lmcache_miniswe"):
        yield name, list(lmcache(os.path.join(folder, name))), False
    yield "claude_code_text", list(claude_code(os.path.join(folder, "claude_code_text"))), True
