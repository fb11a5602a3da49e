"""The incremental detokenizer returns the text of `Tokenizer.decode`, in parts that never change."""

import json
import random
from pathlib import Path

import pytest

from pallas_attn.models.checkpoints import IncrementalDetokenizer, load_tokenizer, text_process
from scripts.tools.tokenizer_layouts import LAYOUTS, added, byte_level, files, gemma, sentencepiece, words, write

EXPECTED = json.loads(Path(__file__).with_name("tokenizer_layouts.json").read_text(encoding="utf-8"))

TEXTS = (
    "hello world",
    "  two spaces ,  a comma . it 's n't ' quoted ' \n\n end ",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 and \U0001f1e9\U0001f1ea.",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "\u0645\u064f\u062d\u064e\u0645\u064e\u0651\u062f e\u0301\u0323 a\u030a",
    "\ufffd \ufeff \u2581 <0xE2> <s>hello</s> <|im_start|>",
)

METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True}
REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
FUSE = {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 2, "stop": 0}
DECODERS = {
    "Metaspace": METASPACE,
    "Metaspace, first removed": {**METASPACE, "prepend_scheme": "first"},
    "WordPiece": {"type": "WordPiece", "prefix": "he", "cleanup": True},
    "WordPiece without cleanup": {"type": "WordPiece", "prefix": "he", "cleanup": False},
    "BPEDecoder": {"type": "BPEDecoder", "suffix": "lo"},
    "Gemma": {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, FUSE]},
    "Strip of each token": {"type": "Sequence", "decoders": [REPLACE, STRIP]},
    "Strip of the text": {"type": "Sequence", "decoders": [REPLACE, FUSE, STRIP, FUSE]},
    "Replace in the text": {
        "type": "Sequence",
        "decoders": [FUSE, {**REPLACE, "pattern": {"String": "lol"}}, {**REPLACE, "pattern": {"String": "\u2581h"}}],
    },
    "ByteLevel, then Replace": {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {**REPLACE, "pattern": {"String": "oh"}},
        ],
    },
}


def check(tokenizer, ids):
    """Compare the incremental text with `decode`, for tokens added one by one and in groups."""
    rng = random.Random(len(ids))
    for skip in (True, False):
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        for largest in (1, 5):
            detokenizer, text, at = IncrementalDetokenizer(tokenizer, skip), "", 0
            while at < len(ids):
                size = rng.randint(1, largest)
                text += detokenizer.add(ids[at : at + size])
                at += size
                assert expected.startswith(text)
            assert text + detokenizer.finish() == expected
            assert detokenizer.finish() == ""


def check_many(tokenizer, seed, texts=TEXTS, rounds=4):
    """Check texts with special tokens between their tokens, random ids and unknown ids."""
    rng, every = random.Random(seed), [*tokenizer.pieces.texts]
    special = [*tokenizer.pieces.special] or every
    check(tokenizer, [])
    for text in texts:
        ids = tokenizer.encode(text)
        check(tokenizer, ids)
        ids.insert(rng.randint(0, len(ids)), rng.choice(special))
        check(tokenizer, ids)
    for _ in range(rounds):
        check(tokenizer, [rng.choice(every) for _ in range(rng.randint(1, 30))])
        check(tokenizer, [rng.choice([*special, 10**8, rng.choice(every)]) for _ in range(12)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_text_equals_decode(load_layout, name):
    tokenizer = load_layout(LAYOUTS[name])
    for ids in EXPECTED[name]["ids"]:
        check(tokenizer, ids)
    check_many(tokenizer, seed=sum(name.encode()), texts=TEXTS[2:3], rounds=1)


def test_text_of_gemma_equals_decode(load_layout):
    """The first space of a text is a part of the text, and runs of spaces and line breaks are tokens."""
    tokenizer = load_layout(LAYOUTS["Gemma 4"])
    check_many(tokenizer, seed=7)
    ids = tokenizer.encode("  hello  user\n\n\n")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add([token]) for token in ids] == ["  ", "hello", "  ", "user", "\n\n", "\n"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("clean_up", [False, True])
def test_text_equals_decode_with_each_decoder(load_layout, name, clean_up):
    base = byte_level if "ByteLevel" in name else sentencepiece
    tokenizer = load_layout(
        files(
            base(decoder=DECODERS[name]),
            {
                "clean_up_tokenization_spaces": clean_up,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": clean_up,
            },
        )
    )
    assert bool(tokenizer.pieces.clean_up) == clean_up
    check_many(tokenizer, seed=3, texts=TEXTS[1::2], rounds=2)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, gemma])
def test_random_bytes_equal_decode(load_layout, make):
    """Bytes that are not UTF-8: truncated, overlong and surrogate encodings."""
    tokenizer = load_layout(files(make()))
    rng = random.Random(5)
    first = tokenizer.encode("\x00")[-1]  # byte-level symbols are in the order of the bytes, too
    leading = [0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF, 0x80, 0x9F, 0xA0, 0x61]
    for _ in range(150):
        data = [rng.choice([rng.randrange(256), rng.choice(leading)]) for _ in range(rng.randint(1, 9))]
        check(tokenizer, [first + byte for byte in data])


def test_characters_are_emitted_with_their_last_byte(load_layout):
    tokenizer = load_layout(files(byte_level()))
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(TEXTS)
    parts = [detokenizer.add([token]) for token in tokenizer.encode(text)]
    assert "".join(parts) == text
    assert detokenizer.finish() == ""
    assert [part for part in parts if part][-6:] == [*"_start|>"][-6:]


def test_incomplete_character_at_the_end(load_layout):
    tokenizer = load_layout(files(byte_level()))
    ids = tokenizer.encode("a\U0001f600")[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add(ids) == "a"
    assert detokenizer.finish() == "\ufffd"
    with pytest.raises(ValueError, match="expected no call of add after finish"):
        detokenizer.add(ids)


def test_byte_tokens_are_emitted_after_their_run(load_layout):
    """One invalid byte makes the library decode all bytes of a run as U+FFFD."""
    tokenizer = load_layout(files(sentencepiece()))
    character = tokenizer.encode("\u4f60")[2:]
    hello = tokenizer.encode("hello")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add([token]) for token in [*character, *hello]] == ["", "", "", "\u4f60 hello"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add([*character, character[0]]) == ""
    assert detokenizer.finish() == "\ufffd" * 4


def test_stored_text_is_bounded(load_layout):
    """The time per token depends on the stored text, which must not grow with the sequence."""
    tokenizer = load_layout(files(words(), {"clean_up_tokenization_spaces": True}))
    detokenizer, text = IncrementalDetokenizer(tokenizer), ""
    ids = tokenizer.encode("hello . n't hi") * 50
    for i, token in enumerate(ids):
        text += detokenizer.add([token])
        assert len(tokenizer.decode(ids[: i + 1])) - len(text) <= 4
    assert text + detokenizer.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
            "the decoder {'type': 'C",
        ),
        ({"type": "Replace", "pattern": {"Regex": "l+"}, "content": "l"}, "Replace only of a text"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "Strip only at the start"),
        ({"type": "Sequence", "decoders": [FUSE, METASPACE]}, "after a decoder that joins tokens"),
    ],
)
def test_unsupported_decoder_raises(load_layout, decoder, message):
    tokenizer = load_layout(files(byte_level(decoder=decoder)))
    with pytest.raises(NotImplementedError, match=message):
        IncrementalDetokenizer(tokenizer)


def test_pieces_of_the_separate_process(tmp_path):
    write(files(byte_level(added("<s>", 400))), tmp_path)
    with pytest.raises(ValueError, match="declares '<s>' with id 400"):
        load_tokenizer(tmp_path)
    write(files(sentencepiece()), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    pieces = tokenizer.pieces
    assert pieces.texts[0] == "<unk>"
    assert pieces.special == {0, 1, 2}
    assert pieces.decoder is not None
    assert pieces.decoder["type"] == "Sequence"
    check(tokenizer, tokenizer.encode("<s>hello \U0001f600 world</s>"))


def test_clean_up_is_defined_once():
    assert text_process.cleaned_up("a . b , c n't ' d '") == "a. b, cn't'd '"
