"""Tokenizer and chat template of one model, run as a program of their own with little time and memory.

Both are untrusted input. A template may loop or ask for terabytes, in more ways than jinja2's sandbox can tell, and the
tokenizers library ends in a Rust panic or in abort() on some files. In a process with limits of its own, all of that is
an answer that never comes. `checkpoints.tokenizer` is the other side: a line of JSON each way, [function, arguments...]
and [true, result] or [false, reason]. Nothing here may import jax or the project, which would take seconds.
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
"""Characters that a template may render, at most."""


class Text:
    """Tokenizer and chat template of a model; each public method answers a request."""

    core: tokenizers.Tokenizer
    template: jinja2.Template

    def load_core(self, path: str) -> None:
        self.core = tokenizers.Tokenizer.from_file(path)
        self.core.no_truncation()  # settings left from training, which would change prompts
        self.core.no_padding()

    def load_template(self, source: str) -> None:
        self.template = environment().from_string(source)

    def render(self, messages: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
        # Templates may test tools and documents with `is none`, which is false for undefined names.
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
    """Makes jinja2's immutable sandbox, with the settings and helpers that templates have in transformers."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    helpers: dict[str, Any] = sandbox.globals
    helpers["raise_exception"] = raise_exception
    helpers["strftime_now"] = strftime_now
    sandbox.filters["tojson"] = to_json
    return sandbox


class Generation(jinja2.ext.Extension):
    """Renders the contents of {% generation %}, the tag around an assistant's text that training masks by."""

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
    """Replaces jinja2's own filter, which escapes HTML's special characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def limit(kind: int, amount: int) -> None:
    """Lowers a limit that the system keeps for this process."""
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if most == resource.RLIM_INFINITY else min(amount, most), most))


def limit_memory(size: int) -> None:
    """Limits this process to `size` bytes of addresses, and lets it leave no core behind."""
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # other systems refuse or ignore it
        limit(resource.RLIMIT_AS, size)


def limit_time(seconds: int) -> None:
    """Has the system end this process after so many more seconds of computing; waiting does not count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def answer(text: Text, function: str, arguments: list[Any]) -> list[Any]:
    try:
        return [True, getattr(text, function)(*arguments)]
    except BaseException as error:  # noqa: BLE001  a panic of the tokenizers library derives from BaseException alone
        return [False, str(error) or type(error).__name__]


def main(seconds: int, memory: int) -> None:
    """Answers the requests on standard input until it ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else may write among the answers
    limit_memory(memory)
    text = Text()
    for line in sys.stdin.buffer:
        limit_time(seconds)
        function, *arguments = json.loads(line)
        replies.write(json.dumps(answer(text, function, arguments)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
