"""`TextOutput`: stop texts, stop tokens and the parts of a text that no later token changes."""

import random
from typing import Literal

import pytest

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.checkpoints import tokenizer as checkpoints_tokenizer
from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.llm.text_output import TextOutput
from scripts.tools.tokenizer_layouts import BYTES, added, byte_level, files, sentencepiece, write
from tests.models.text_process_case import OwnProcess

EOS = BYTES


def tokenizer_of(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(checkpoints_tokenizer, "_Process", OwnProcess)
    write(layout, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    return tokenizer_of(tmp_path, monkeypatch, files(byte_level(added("</s>", EOS), added("<x>", EOS + 1))))


def run(tokenizer, ids, last: Literal["length", "stop"] = "length", **params):
    """Add tokens until the output ends. Return the output and all texts that it returned."""
    output = TextOutput(tokenizer, SamplingParams(max_tokens=100, **params), (EOS,))
    texts, taken = [], []
    for i, token in enumerate(ids):
        output.add(token, last if i == len(ids) - 1 else None)
        text, tokens = output.take()
        texts.append(text)
        taken += tokens
        if output.finish_reason is not None:
            break
    assert "".join(texts) == output.text
    assert taken == output.token_ids == ids[: len(taken)]
    return output, texts


@pytest.mark.parametrize("stop", ["wor", "world", "o w", "hello world", "h", "d", " ", "ld!"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_text_ends_the_output_at_the_same_place_for_all_token_borders(tokenizer, stop, include):
    text = "hello world!"
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    whole, single = tokenizer.encode(text), [token for c in text for token in tokenizer.encode(c)]
    assert len(whole) == 3
    for ids in (whole, single, [*tokenizer.encode("hel"), *tokenizer.encode("lo world"), *tokenizer.encode("!")]):
        output, _ = run(tokenizer, ids, stop=stop, include_stop_str_in_output=include)
        assert (output.text, output.finish_reason, output.stop_reason) == (expected, "stop", stop)
    # No token is generated after the one that completes the stop text.
    output, _ = run(tokenizer, single, stop=stop)
    assert len(output.token_ids) == text.index(stop) + len(stop)


def test_the_stop_text_that_ends_first_applies(tokenizer):
    for ids in (tokenizer.encode("hello world"), [token for c in "hello world" for token in tokenizer.encode(c)]):
        output, _ = run(tokenizer, ids, stop=["world", "lo wo", "or", "xyz"])
        assert (output.text, output.stop_reason) == ("hel", "lo wo")
        output, _ = run(tokenizer, ids, stop=["o", "llo", "hello w"])
        assert (output.text, output.stop_reason) == ("he", "llo")


def test_text_that_may_start_a_stop_text_is_returned_later(tokenizer):
    ids = [token for c in "aab aabab" for token in tokenizer.encode(c)]
    output, texts = run(tokenizer, ids, stop="aabab")
    assert texts == ["", "", "", "aab ", "", "", "", "", ""]
    assert (output.text, output.finish_reason) == ("aab ", "stop")
    output, texts = run(tokenizer, ids[:-1], stop="aabab")
    assert texts == ["", "", "", "aab ", "", "", "", "aaba"]
    assert output.finish_reason == "length"
    _, texts = run(tokenizer, ids, stop="aabab", include_stop_str_in_output=True)
    assert texts == [*"aab aabab"]


def test_random_texts_and_stops(tokenizer):
    """Compare with the definition: the stop text with the first end, and of these the longest."""
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choice("ab\u00e9") for _ in range(rng.randint(1, 12)))
        stops = ["".join(rng.choice("ab\u00e9") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        include = rng.random() < 0.5
        ends = [(i + len(s), i, s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
        expected, reason = (text, "length")
        if ends:
            end, start, reason = min(ends)
            expected = text[: end if include else start]
        ids = [token for c in text for token in tokenizer.encode(c)]
        output, _ = run(tokenizer, ids, stop=stops, include_stop_str_in_output=include)
        assert (output.text, output.stop_reason or "length") == (expected, reason)


def test_stop_text_within_min_tokens_is_ignored(tokenizer):
    ids = [token for c in "abcabc" for token in tokenizer.encode(c)]
    for min_tokens, expected in ((0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabc")):
        output, _ = run(tokenizer, ids, stop="bc", min_tokens=min_tokens)
        assert output.text == expected, min_tokens
        assert output.finish_reason == ("length" if min_tokens == 6 else "stop")


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        ({}, "ab", None),
        ({"include_stop_str_in_output": True}, "ab", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab</s>", None),
        ({"skip_special_tokens": False}, "ab", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, "ab", EOS),
    ],
)
def test_end_of_sequence_token(tokenizer, params, text, stop_reason):
    output, _ = run(tokenizer, [*tokenizer.encode("ab"), EOS], "stop", **params)
    assert (output.text, output.stop_reason, output.finish_reason) == (text, stop_reason, "stop")
    assert output.token_ids[-1] == EOS


def test_stop_token_is_not_decoded(tokenizer):
    ids = tokenizer.encode("hello world")
    output, _ = run(tokenizer, ids, "stop", stop_token_ids=[ids[-1]])
    assert (output.text, output.stop_reason) == ("hello", ids[-1])
    output, _ = run(tokenizer, ids, "stop", stop_token_ids=[ids[-1]], include_stop_str_in_output=True)
    assert (output.text, output.stop_reason) == ("hello world", ids[-1])


def test_special_tokens_are_skipped(tokenizer):
    ids = [*tokenizer.encode("a"), EOS + 1, *tokenizer.encode("b")]
    assert run(tokenizer, ids)[0].text == "ab"
    assert run(tokenizer, ids, skip_special_tokens=False)[0].text == "a<x>b"
    assert run(tokenizer, ids, skip_special_tokens=False, stop="<x>")[0].text == "a"
    assert run(tokenizer, ids, stop="<x>")[0].text == "ab"


def test_stop_text_in_the_rest_of_the_text(tmp_path, monkeypatch):
    """Byte tokens are decoded when their run ends, here at the end of the output."""
    tokenizer = tokenizer_of(tmp_path, monkeypatch, files(sentencepiece()))
    ids = tokenizer.encode("hello \u4f60")[1:]
    output, texts = run(tokenizer, ids, stop="\u4f60")
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello ", "stop", "\u4f60")
    assert texts[-1] == ""


def test_output_without_tokenizer():
    output = TextOutput(None, SamplingParams(), ())
    output.add(3, None)
    output.add(4, "length")
    assert (output.take(), output.text) == (("", [3, 4]), "")
    with pytest.raises(ValueError, match="stop: the model has no tokenizer"):
        TextOutput(None, SamplingParams(stop="a"), ())


def test_restarted_output_skips_what_was_taken(tokenizer):
    ids = tokenizer.encode("hello world")
    output = TextOutput(tokenizer, SamplingParams(), ())
    output.add(ids[0], None)
    assert output.take() == ("hello", ids[:1])
    new = output.restarted()
    for token in ids:
        new.add(token, None)
    assert new.take() == (" world", ids[1:])
