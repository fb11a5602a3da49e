"""Separation of a model's reasoning from its answer."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pallas_attn.models.server.output_text import OutputParser, Steps

type ReasoningFamily = Literal["think", "gpt_oss"]
type ToolCallFamily = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "glm",
    "gpt_oss",
]
type Part = tuple[Literal["reasoning", "content"], str]

THINK, END_THINK = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MESSAGE_ENDS = (END, "<|return|>", "<|call|>", "<|endoftext|>", START)
"""Special tokens that end a message of gpt-oss."""

_THINK_ENDS = ("<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>")
"""Special tokens that end a message of models with <think> tags."""


class ParserNames(NamedTuple):
    """Names of the parsers of a model; None for text without tool calls or reasoning.

    Attributes:
      tool_calls: "hermes": JSON in <tool_call> tags, as Qwen3. "qwen3_coder": <function=...> and <parameter=...> tags.
        "llama3_json": a JSON object, as Llama 3. "deepseek_v3": DeepSeek V3 and R1. "deepseek_v31": DeepSeek V3.1.
        "deepseek_v32", "deepseek_v4": DSML tags in <｜DSML｜function_calls> or <｜DSML｜tool_calls>. "glm": GLM-4.5 and
        later. "gpt_oss": the harmony format.
      reasoning: "think": text in <think> tags. "gpt_oss": the harmony format.
    """

    tool_calls: ToolCallFamily | None
    reasoning: ReasoningFamily | None


def family_of(model_type: str, chat_template: str | None) -> ParserNames:
    """Return the names of the parsers of a model, from its model type and its chat template."""
    template = chat_template or ""
    if CHANNEL in template or (model_type == "gpt_oss" and chat_template is not None):
        return ParserNames("gpt_oss", "gpt_oss")
    reasoning = "think" if END_THINK in template or THINK in template else None
    if "<｜tool▁call▁begin｜>" in template:
        return ParserNames("deepseek_v3" if "```json" in template else "deepseek_v31", reasoning)
    if "<arg_key>" in template:
        return ParserNames("glm", reasoning)
    if "｜DSML｜" in template:
        return ParserNames("deepseek_v32" if "function_calls>" in template else "deepseek_v4", reasoning)
    if "<tool_call>" in template and "<parameter=" in template:
        return ParserNames("qwen3_coder", reasoning)
    if "<tool_call>" in template and "<function=" not in template:  # an unknown format
        return ParserNames("hermes", reasoning)
    if model_type == "llama" and "ipython" in template:
        return ParserNames("llama3_json", reasoning)
    return ParserNames(None, reasoning)


def starts_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the tag that opens the reasoning."""
    return prompt.rstrip().endswith(THINK)


class ReasoningParser(OutputParser[Part]):
    """Divides an output into reasoning and content. Created by `reasoning_parser`.

    `feed(text)` and `finish()` return lists of parts ("reasoning", text) and ("content", text). The content is the
    input of `ToolCallParser`. It contains the markers of tool calls. In the harmony format, it contains the markers of
    all messages except reasoning.
    """

    def _reasoning(self, text: str) -> None:
        self._items.append(("reasoning", text))

    def _content(self, text: str) -> None:
        self._items.append(("content", text))

    def _parse(self) -> Steps[None]:
        yield from self._read_all(self._content)


class _Think(ReasoningParser):
    """Reasoning in <think> tags at the start of the output. White space around the tags is removed."""

    def __init__(self, prompt: str):
        self._is_inside, self._space = starts_in_reasoning(prompt), ""
        super().__init__()

    def _parse(self) -> Steps[None]:
        space = yield from self._read_space()
        if not self._is_inside and not (yield from self._read_prefix(THINK)):
            self._rest = space + self._rest
            yield from self._read_all(self._content)
            return
        yield from self._read_prefix(THINK)  # some models repeat the tag of the prompt
        yield from self._read_space()
        while (yield from self._read_until((END_THINK, *_THINK_ENDS), self._stripped_reasoning)) in _THINK_ENDS:
            pass
        yield from self._read_space()
        yield from self._read_all(self._content)

    def _stripped_reasoning(self, text: str) -> None:
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]  # it is lost if the reasoning ends here
        if end:
            self._reasoning(text[:end])


class _HarmonyReasoning(ReasoningParser):
    """Reasoning in messages of the channel "analysis" that have no recipient."""

    def _parse(self) -> Steps[None]:
        while (marker := (yield from self._read_until((CHANNEL, START), self._content))) is not None:
            header = [marker]
            end = yield from self._read_until((MESSAGE, *MESSAGE_ENDS[:-1]), header.append)
            text = "".join(header)
            if end == MESSAGE and re.search(rf"{re.escape(CHANNEL)}\s*analysis\b", text) and "to=" not in text:
                end = yield from self._read_until(MESSAGE_ENDS, self._reasoning)
                self._rest = (START if end == START else "") + self._rest
                continue
            self._content(text + (end or ""))
            if end == MESSAGE:
                end = yield from self._read_until(MESSAGE_ENDS, self._content)
                if end == START:
                    self._rest = START + self._rest
                elif end is not None:
                    self._content(end)


def reasoning_parser(family: str | None, prompt: str = "") -> ReasoningParser:
    """Return a parser for one output.

    Args:
      family: `ParserNames.reasoning`.
      prompt: the rendered prompt. The output starts inside the reasoning if the prompt ends with <think>.

    Raises:
      ValueError: unknown family.
    """
    match family:
        case None:
            return ReasoningParser()
        case "think":
            return _Think(prompt)
        case "gpt_oss":
            return _HarmonyReasoning()
    raise ValueError(f"family: expected think, gpt_oss or None, got {family!r}")
