"""The worst bodies: some of a few kilobytes that inflate to a thousand times their size, and are refused for that; others that are
read to their end, as they inflate to just under the 32 times that are taken, or are as long as they look."""

import base64
import gzip
import random

# Just under the default `proxy.body_limit` of 64 MiB.
INFLATED = 66_000_000
MESSAGES = b'"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}]'


def template_arguments(size: int = INFLATED) -> bytes:
    """A tree of millions of numbers that the chat template asks for."""
    return b'{"chat_template_kwargs":{"a":[' + b"0," * (size // 2 - 100) + b"0]}," + MESSAGES + b"}"


def empty_arrays(size: int = INFLATED) -> bytes:
    return b'{"x":[' + b"[]," * (size // 3 - 100) + b"[]]," + MESSAGES + b"}"


def escaped_name(size: int = INFLATED) -> bytes:
    """A field's name that has to be unescaped before it can be compared."""
    return b'{"\\u0061' + b"a" * (size - 200) + b'":1,' + MESSAGES + b"}"


def deep(size: int = INFLATED) -> bytes:
    half = size // 2 - 200
    return b'{"x":' + b"[" * half + b"]" * half + b"," + MESSAGES + b"}"


# Most bytes that one byte of gzip may become, less a little.
DENSITY = 31


def taken(shape: bytes) -> bytes:
    """The same as dense as is taken: a field that nothing shortens makes the body longer on the wire."""
    noise = base64.b64encode(random.Random(len(shape)).randbytes(len(shape) // DENSITY))
    # Of its own length, so that the whole stays below the limit.
    return b'{"noise":"' + noise + b'",' + shape[1:]


def long_text() -> bytes:
    """Ten million words that no tokenizer knows as one, uncompressed."""
    words = base64.b64encode(random.Random(1).randbytes(24 << 20)).replace(b"+", b" ").replace(b"/", b" ")
    return b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"' + words + b'"}]}'


def long_list() -> bytes:
    return b'{"x":[' + b"[]," * (8 << 20) + b"[]]," + MESSAGES + b"}"


SHAPES = (template_arguments, empty_arrays, escaped_name, deep)
GZIP = {"content-encoding": "gzip"}


def worst() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Each by its name, as it is sent and with which headers; all are refused for their density."""
    return {shape.__name__: (gzip.compress(shape(), 9), GZIP) for shape in SHAPES}


def accepted() -> dict[str, tuple[bytes, dict[str, str]]]:
    """The same of those that no refusal for their density or length keeps from being read."""
    packed = {f"{shape.__name__}, taken": (gzip.compress(taken(shape(INFLATED * 9 // 10)), 9), GZIP) for shape in SHAPES}
    return packed | {shape.__name__: (shape(), {}) for shape in (long_text, long_list)}
