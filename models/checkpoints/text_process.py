"""Tokenizer and chat template of one model, run in a separate process with limited time and memory.

Both are untrusted input. A template may loop or allocate terabytes in ways that jinja2's sandbox does not prevent, and
the tokenizers library panics or aborts on some files. In a separate process these failures only end the process.
`checkpoints.tokenizer` is the client. A request is one line of JSON, [function, arguments...]; the response is [true,
result] or [false, reason]. This module must not import jax or the project, because these imports take seconds.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

LARGEST_TEXT = 2**26
"""Maximum number of characters that a template may render."""


class Text:
    """Tokenizer and chat template of a model. Each public method handles one kind of request."""

    core: tokenizers.Tokenizer
    template: jinja2.Template

    def load_core(self, path: str) -> None:
        self.core = tokenizers.Tokenizer.from_file(path)
        self.core.no_truncation()  # settings from training would change prompts
        self.core.no_padding()

    def load_template(self, source: str) -> None:
        self.template = environment().from_string(source)

    def render(self, messages: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
        # Templates may test tools and documents with `is none`, which is false for undefined variables.
        assumed = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        text = self.template.render(assumed, **special_tokens)
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"it makes {len(text):,} characters of one message, more than {LARGEST_TEXT:,}")
        return text

    def token_to_id(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int]) -> str:
        return self.core.decode(token_ids, skip_special_tokens=True)


def environment() -> jinja2.Environment:
    """Return jinja2's immutable sandbox with the settings and helpers of chat templates in transformers."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    helpers: dict[str, Any] = sandbox.globals
    helpers["raise_exception"] = raise_exception
    helpers["strftime_now"] = strftime_now
    sandbox.filters["tojson"] = to_json
    return sandbox


class Generation(jinja2.ext.Extension):
    """Render the contents of {% generation %}, the tag that marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (typed so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replacement of jinja2's filter `tojson`, which escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def limit(kind: int, amount: int) -> None:
    """Lower a resource limit of this process."""
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if most == resource.RLIM_INFINITY else min(amount, most), most))


def limit_memory(size: int) -> None:
    """Limit the address space of this process to `size` bytes, and disable core dumps."""
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # not supported on other systems
        limit(resource.RLIMIT_AS, size)


def limit_time(seconds: int) -> None:
    """End this process after `seconds` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def answer(text: Text, function: str, arguments: list[Any]) -> list[Any]:
    try:
        return [True, getattr(text, function)(*arguments)]
    except BaseException as error:  # noqa: BLE001  panics of the tokenizers library derive from BaseException
        return [False, str(error) or type(error).__name__]


def main(seconds: int, memory: int) -> None:
    """Handle requests from standard input until it is closed."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to stderr, not between the responses
    limit_memory(memory)
    text = Text()
    for line in sys.stdin.buffer:
        limit_time(seconds)
        function, *arguments = json.loads(line)
        replies.write(json.dumps(answer(text, function, arguments)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
