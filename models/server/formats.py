"""Formats of reasoning and tool calls of the model families: markers, and the choice from a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

type Tool = Mapping[str, Any]
"""Tool of a request: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}."""

THINK, END_THINK = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MESSAGE_ENDS = (END, "<|return|>", "<|call|>", "<|endoftext|>", START)
"""Special tokens that end a message of gpt-oss."""

CALL, END_CALL = "<tool_call>", "</tool_call>"
CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = "｜DSML｜"
GEMMA_CALL, END_GEMMA_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_CHANNEL, END_GEMMA_CHANNEL = "<|channel>", "<channel|>"

QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
DEEPSEEK_ENDS = ("<｜end▁of▁sentence｜>",)
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
GEMMA_ENDS = ("<turn|>", "<eos>", "<|tool_response>")
THINK_ENDS = (*QWEN_ENDS, *DEEPSEEK_ENDS, *GLM_ENDS[1:])
"""Special tokens that end a message in formats with <think> tags."""


class ParserNames(NamedTuple):
    """Names of the parsers of a model; None for text without tool calls or reasoning.

    Attributes:
      tool_calls: a key of `tool_calls.PARSERS`.
      reasoning: an entry of `REASONING`. "think": text in <think> tags. "gemma4": the channel "thought". "gpt_oss": the
        harmony format.
    """

    tool_calls: str | None
    reasoning: str | None


TAGS = {"think": (THINK, END_THINK), "gemma4": (f"{GEMMA_CHANNEL}thought\n", END_GEMMA_CHANNEL)}
"""Texts before and after the reasoning, by format."""

REASONING = (*TAGS, "gpt_oss")
"""Formats of reasoning."""

_SIGNS = {
    "gemma4": (f"{GEMMA_CALL}call:",),
    "deepseek_v3": (CALL_BEGIN, "```json"),
    "deepseek_v31": (CALL_BEGIN,),
    "glm": ("<arg_key>",),
    "deepseek_v32": (DSML, "function_calls>"),
    "deepseek_v4": (DSML,),
    "qwen3_coder": (CALL, "<parameter="),
    None: (CALL, "<function="),  # an unknown format
    "hermes": (CALL,),
}
"""Strings by format. A chat template has the first format of which it contains all strings."""


def family_of(model_type: str, chat_template: str | None) -> ParserNames:
    """Return the names of the parsers of a model, from its model type and its chat template."""
    template = chat_template or ""
    if CHANNEL in template or (model_type == "gpt_oss" and chat_template is not None):
        return ParserNames("gpt_oss", "gpt_oss")
    reasoning = "think" if END_THINK in template or THINK in template else None
    if GEMMA_CHANNEL in template:
        reasoning = "gemma4"
    for family, signs in _SIGNS.items():
        if all(sign in template for sign in signs):
            if family is None:
                break
            return ParserNames(family, reasoning)
    return ParserNames("llama3_json" if model_type == "llama" and "ipython" in template else None, reasoning)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the properties of the JSON schema of an object; empty if the schema declares none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_text(schema: Any) -> bool:
    """Return whether formats with tags write values of a JSON schema without quotation marks."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"
