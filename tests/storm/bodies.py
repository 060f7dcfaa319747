"""The worst bodies of a few kilobytes: what they cost whoever reads them is up to a thousand times their size."""

import gzip

# Just under the default `proxy.body_limit` of 64 MiB.
INFLATED = 66_000_000
MESSAGES = b'"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}]'


def template_arguments() -> bytes:
    """A tree of millions of numbers that the chat template asks for."""
    return b'{"chat_template_kwargs":{"a":[' + b"0," * (INFLATED // 2 - 100) + b"0]}," + MESSAGES + b"}"


def empty_arrays() -> bytes:
    return b'{"x":[' + b"[]," * (INFLATED // 3 - 100) + b"[]]," + MESSAGES + b"}"


def escaped_name() -> bytes:
    """A field's name that has to be unescaped before it can be compared."""
    return b'{"\\u0061' + b"a" * (INFLATED - 200) + b'":1,' + MESSAGES + b"}"


def deep() -> bytes:
    half = INFLATED // 2 - 200
    return b'{"x":' + b"[" * half + b"]" * half + b"," + MESSAGES + b"}"


def worst() -> dict[str, bytes]:
    """Each by its name, compressed as it is sent."""
    shapes = (template_arguments, empty_arrays, escaped_name, deep)
    return {shape.__name__: gzip.compress(shape(), 9) for shape in shapes}
