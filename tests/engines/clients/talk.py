"""What every client asks, and how its findings are handed over."""

import json
import sys

URL = sys.argv[1]
QUESTION = [{"role": "system", "content": "You help travellers."}, {"role": "user", "content": "Which gate is it?"}]
# All choices are bounded: a grammar ends an answer whatever the weights would rather say.
PLACE = {"type": "object", "additionalProperties": False, "required": ["city", "unit"], "properties": {
    "city": {"enum": ["Oslo", "Lima", "Pune"]}, "unit": {"enum": ["celsius", "kelvin"]}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather somewhere.", "parameters": PLACE}}
SEATS = {"type": "function", "function": {"name": "seats", "description": "Free seats.", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["row"], "properties": {"row": {"enum": ["A", "B", "C"]}}}}}

_found: dict[str, object] = {}


def found(what: str, got) -> None:
    assert what not in _found, what
    _found[what] = got


def done() -> None:
    json.dump(_found, sys.stdout, default=plain)


def plain(value):
    """An object of a client's own as what JSON knows."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else repr(value)
