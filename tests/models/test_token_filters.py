"""Filters of the next token: bad words, grammars and their combination."""

import copy
import json
import random
import re

import llguidance
import numpy as np
import pytest

from pallas_attn.models.checkpoints import tokenizer as checkpoints_tokenizer
from pallas_attn.models.checkpoints.detokenizer import token_bytes
from pallas_attn.models.checkpoints.text_process import grammar_text
from pallas_attn.models.checkpoints.tokenizer import GrammarChecker
from pallas_attn.models.engine import FilterCall, StructuredOutputs, TokenFilter
from pallas_attn.models.engine.token_filter import compute_masks
from pallas_attn.models.llm import token_filters
from pallas_attn.models.llm.token_filters import (
    AllOf,
    BadWords,
    GrammarFilter,
    GrammarTokenizer,
    full_mask,
    token_mask,
)
from scripts.tools.tokenizer_layouts import BYTES, added, byte_level, files, sentencepiece, unigram, words

EOS, SPECIAL, PLAIN = BYTES, BYTES + 1, BYTES + 2
TOKENS = (added("</s>", EOS), added("<tool>", SPECIAL), added("<think>", PLAIN, special=False))
VOCAB_SIZE = 300
"""Number of tokens of the model. The tokenizer has fewer."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def tokenizer(load_layout):
    return load_layout(files(byte_level(*TOKENS)))


@pytest.fixture
def grammars(tokenizer):
    return GrammarTokenizer(tokenizer, VOCAB_SIZE, [EOS])


def ids_of(mask, vocab_size=VOCAB_SIZE):
    """Return the tokens of a mask, and check its form."""
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab_size // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_masks(vocab_size):
    assert ids_of(full_mask(vocab_size), vocab_size) == set(range(vocab_size))
    chosen = {0, vocab_size // 2, vocab_size - 1}
    assert ids_of(token_mask(vocab_size, [*chosen, vocab_size, -1]), vocab_size) == chosen


# --- bad words


def test_last_token_of_a_bad_word_is_excluded_after_the_others(tokenizer):
    hello, world = tokenizer.encode("hello world")
    bad = BadWords(["hello world", "!!"], tokenizer, VOCAB_SIZE)
    assert isinstance(bad, TokenFilter)
    (mark,) = set(tokenizer.encode("!!"))
    every = set(range(VOCAB_SIZE))
    assert bad.allowed([]) is None
    assert ids_of(bad.allowed([hello])) == every - {world}
    assert ids_of(bad.allowed([5, hello])) == every - {world}
    assert ids_of(bad.allowed([mark])) == every - {mark}
    assert bad.allowed([hello, 5]) is None


@pytest.mark.parametrize("word", ["cat", "  cat"])
def test_bad_word_of_one_token_is_excluded_with_and_without_space(tokenizer, monkeypatch, word):
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens: {"cat": [1], " cat": [2]}[text])
    assert ids_of(BadWords([word], tokenizer, 40).allowed([7]), 40) == {*range(40)} - {1, 2}


def test_space_that_adds_a_token_gives_no_other_sequence(tokenizer):
    """vLLM's rule: the sequence with a space is excluded only if it has as many tokens."""
    (a,), (space, _) = tokenizer.encode("a"), tokenizer.encode(" a")
    bad = BadWords(["a"], tokenizer, VOCAB_SIZE)
    assert ids_of(bad.allowed([space])) == set(range(VOCAB_SIZE)) - {a}


def test_bad_words_equal_the_rule_of_vllm(tokenizer):
    rng = random.Random(1)
    chosen = ["hello", "ab", "aab", "b", "hello world", "ba"]
    sequences = []
    for word in chosen:
        plain, spaced = (tokenizer.encode(start + word, add_special_tokens=False) for start in ("", " "))
        sequences.append(plain)
        if spaced[0] != sequences[-1][0] and len(spaced) == len(sequences[-1]):
            sequences.append(spaced)
    alphabet = sorted({token for sequence in sequences for token in sequence})
    bad = BadWords(chosen, tokenizer, VOCAB_SIZE)
    for _ in range(200):
        past = [rng.choice(alphabet) for _ in range(rng.randint(0, 4))]
        excluded = {s[-1] for s in sequences if len(s) <= len(past) + 1 and past[len(past) - len(s) + 1 :] == s[:-1]}
        mask = bad.allowed(past)
        assert (set() if mask is None else set(range(VOCAB_SIZE)) - ids_of(mask)) == excluded


def test_bad_word_outside_the_vocabulary_raises(tokenizer):
    with pytest.raises(ValueError, match="bad_words: expected texts that have tokens of the model's vocabulary, got"):
        BadWords(["a", "</s>"], tokenizer, EOS)


# --- bytes of tokens


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_of_tokens_give_the_text(load_layout, make):
    tokenizer = load_layout(files(make()))
    values = token_bytes(tokenizer.pieces)
    for text in ("hello world", "\u4f60 \U0001f600 e\u0301"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(values[token] for token in ids).decode().strip() == text


def test_bytes_of_metaspace_tokens(load_layout):
    tokenizer = load_layout(files(unigram()))
    ids = tokenizer.encode("hello world")
    assert b"".join(token_bytes(tokenizer.pieces)[token] for token in ids) == b" hello world"


@pytest.mark.parametrize(
    "decoder",
    [
        [{"type": "Replace", "pattern": {"String": "o"}, "content": "00"}, {"type": "Fuse"}],
        [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "l"}, "content": ""}],
        [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            {"type": "Fuse"},
        ],
    ],
)
def test_bytes_of_tokens_with_other_decoders(load_layout, decoder):
    made = sentencepiece()
    made["decoder"] = {"type": "Sequence", "decoders": decoder}
    tokenizer = load_layout(files(made))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    values = token_bytes(tokenizer.pieces)
    assert b"".join(values[token] for token in ids).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (files(words()), "with its decoder Join"),
        (
            files(
                {
                    **sentencepiece(),
                    "decoder": {
                        "type": "Sequence",
                        "decoders": [
                            {"type": "Fuse"},
                            {"type": "Replace", "pattern": {"String": "lo"}, "content": "x"},
                        ],
                    },
                }
            ),
            "with its decoder Replace",
        ),
        (
            files(
                sentencepiece(),
                {
                    "clean_up_tokenization_spaces": True,
                    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
                },
            ),
            "with clean_up_tokenization_spaces",
        ),
    ],
)
def test_tokens_that_depend_on_others_raise(load_layout, layout, message):
    with pytest.raises(NotImplementedError, match=message):
        token_bytes(load_layout(layout).pieces)


# --- grammars


DEEP = "\n".join(["start: r0", *(f'r{i}: r{i + 1} | "x"' for i in range(20_000)), 'r20000: "a"'])
"""A grammar whose compilation needs more stack than `GrammarChecker` has."""

SLOW = json.dumps({"patternProperties": {f"^{i:05x}": {} for i in range(4000)}, "type": "object"})
"""A schema whose compilation takes minutes."""


def test_checker_refuses_grammars_that_need_too_much(monkeypatch):
    monkeypatch.setattr(checkpoints_tokenizer, "GRAMMAR_SECONDS", 1)
    checker = GrammarChecker([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256])
    slow = "this takes more than 1 s"
    for reason, kind, value in (("SIGSEGV", "grammar", DEEP), (slow, "json", SLOW), (slow, "grammar", "\n" * 2**17)):
        with pytest.raises(ValueError, match=f"structured_outputs: the grammar is too complex: .*{reason}"):
            checker.check(kind, value)
    for outputs in (
        {"json": json.dumps(SCHEMA)},
        {"regex": "("},
        {"choice": ("a", "\u4f60")},
        {"grammar": 'root ::= "a"'},
    ):
        ((kind, value),) = outputs.items()
        assert checker.check(kind, value) == grammar_text(kind, value)  # an error of the compilation is no reason
    with pytest.raises(ValueError, match="^structured_outputs: grammar: Failed to convert the grammar"):
        checker.check("grammar", "root ::= (")


def test_checker_that_cannot_load_its_tokens_is_no_error_of_the_grammar():
    with pytest.raises(RuntimeError, match=r"^the vocabulary for grammars: list index out of range") as raised:
        GrammarChecker([b"a", b"</s>"], [1], [])
    assert not isinstance(raised.value, ValueError)  # the server reports ValueError as an error of the request


def test_error_of_a_panic_has_no_backtrace(grammars, monkeypatch):
    class Panicked:
        """A matcher whose construction has panicked. llguidance 1.9 catches panics."""

        grammar_from_regex = llguidance.LLMatcher.grammar_from_regex

        def __init__(self, *arguments, **options):
            self.is_error, self.get_error = lambda: True, lambda: "panic: index\n<backtrace>\n 0: x\n</backtrace>"

    monkeypatch.setattr(llguidance, "LLMatcher", Panicked)
    with pytest.raises(ValueError, match="structured_outputs: regex: panic: index$"):
        grammars.matcher(StructuredOutputs(regex="a"))


def walk(grammars, outputs, rng, limit=60, filters=None):
    """Generate random tokens that a filter allows, up to an end-of-sequence token. Return their text."""
    grammar = GrammarFilter(grammars, outputs)
    ids: list[int] = []
    while len(ids) < limit:
        allowed = ids_of(grammar.allowed(ids), grammars.vocab_size) - {EOS}
        if EOS in ids_of(grammar.allowed(ids), grammars.vocab_size) and (not allowed or rng.random() < 0.5):
            return grammars.tokens, ids
        ids.append(rng.choice(sorted(allowed)))
    return None


@pytest.mark.parametrize(
    "outputs",
    [
        StructuredOutputs(regex=r"(hello|hi)( world)?[0-9]{1,3}"),
        StructuredOutputs(choice=["yes", "no", 'a "quoted"\n\\ text', "\U0001f600 \u4f60", "<think>"]),
        StructuredOutputs(grammar='start: "(" (start | "a")* ")"'),
        StructuredOutputs(grammar='root ::= "(" (root | "a")* ")"'),
        StructuredOutputs(json={"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3}),
    ],
    ids=["regex", "choice", "Lark", "GBNF", "json"],
)
def test_generated_texts_match_the_format(grammars, tokenizer, outputs):
    rng, texts = random.Random(2), set()
    for _ in range(12):
        found = walk(grammars, outputs, rng)
        if found is not None:
            texts.add(tokenizer.decode(found[1], skip_special_tokens=False))
    assert len(texts) > 2
    for text in texts:
        if outputs.regex:
            assert re.fullmatch(outputs.regex, text)
        elif outputs.choice:
            assert text in outputs.choice
        elif outputs.grammar:
            assert re.fullmatch(r"[a()]+", text)
            assert text.count("(") == text.count(")")
        else:
            assert all(item in ("x", 1, None) for item in json.loads(text))


def test_text_of_a_schema_is_allowed_and_then_ends(grammars, tokenizer):
    grammar = GrammarFilter(grammars, StructuredOutputs(json=SCHEMA))
    ids = tokenizer.encode('{"name": "hello \U0001f600", "age": 12}')
    for i, token in enumerate(ids):
        allowed = ids_of(grammar.allowed(ids[:i]))
        assert token in allowed
        assert EOS not in allowed
    assert ids_of(grammar.allowed(ids)) == {EOS}
    assert ids_of(grammar.allowed([*ids, EOS])) == {EOS}  # with ignore_eos
    assert ids_of(grammar.allowed([*ids, EOS, 5])) == {EOS}


def test_text_that_could_continue_ends_with_the_first_end_of_sequence_token(grammars, tokenizer):
    grammar, one = GrammarFilter(grammars, StructuredOutputs(regex="[0-9]{1,2}")), tokenizer.encode("1")
    assert len(ids_of(grammar.allowed(one))) > 1
    assert ids_of(grammar.allowed([*one, EOS])) == {EOS}  # with ignore_eos
    assert ids_of(grammar.allowed([*one, EOS, *one])) == {EOS}


def test_special_tokens_and_padding_are_never_allowed(grammars):
    allowed = ids_of(GrammarFilter(grammars, StructuredOutputs(regex=r"(?s:.*)")).allowed([]))
    assert allowed.isdisjoint({SPECIAL, *range(PLAIN + 1, VOCAB_SIZE)})
    assert {EOS, PLAIN} <= allowed  # <think> is not special: it is a part of the text


def test_any_order_of_calls_gives_the_masks_of_new_filters(grammars, tokenizer):
    """With drafts, the engine asks for tokens that it rejects later; after a preemption it may start over."""
    outputs = StructuredOutputs(json=SCHEMA)
    ids = tokenizer.encode('{"name": "hello world", "age": 1234}')
    wrong = [[*ids[:i], token] for i in range(0, len(ids), 3) for token in (tokenizer.encode("}")[0], EOS)]
    calls = [ids[:i] for i in range(len(ids) + 1)] + wrong
    expected = {tuple(call): GrammarFilter(grammars, outputs).allowed(call) for call in calls}
    grammar, rng = GrammarFilter(grammars, outputs), random.Random(3)
    for _ in range(3):
        rng.shuffle(calls)
        for call in calls:
            np.testing.assert_array_equal(grammar.allowed(call), expected[tuple(call)])
    assert grammar.error is None


def test_masks_of_a_batch_equal_the_masks_of_new_filters(grammars, tokenizer, monkeypatch):
    """Many filters, some of which have ended or left the grammar, and calls with the same filter."""
    threads = llguidance.LLExecutor(3)
    monkeypatch.setattr(token_filters, "_executor", lambda: threads)
    formats = [StructuredOutputs(json=SCHEMA), StructuredOutputs(regex="[a-z ]*[0-9]")]
    texts = [tokenizer.encode('{"name": "hello world", "age": 1234}'), tokenizer.encode("hello world 3")]
    filters = [GrammarFilter(grammars, formats[i % 2], min_tokens=i % 5) for i in range(8)]
    only_eos = token_mask(VOCAB_SIZE, [EOS])
    rng = random.Random(4)
    for _ in range(20):
        calls, expected = [], []
        for i in rng.choices(range(8), k=12):
            ids = texts[i % 2][: rng.randint(0, len(texts[i % 2]))] + rng.choice([[], [], [EOS], [EOS, 5], [7]])
            bad = BadWords(["hello", "1"], tokenizer, VOCAB_SIZE)
            combine = rng.choice([lambda one: one, lambda one, bad=bad: AllOf([bad, one], only_eos)])
            calls.append(FilterCall(combine(filters[i]), ids))
            expected.append(combine(GrammarFilter(grammars, formats[i % 2], min_tokens=i % 5)).allowed(ids))
        np.testing.assert_array_equal(compute_masks(calls), expected)
    assert [of_format.error for of_format in filters] == [None] * 8


class Interrupting:
    """Threads whose first call that consumes tokens is interrupted after it."""

    def __init__(self):
        self._threads, self.num_moves = llguidance.LLExecutor(2), 0
        self.unsafe_compute_mask_ptr = self._threads.unsafe_compute_mask_ptr

    def consume_token_par(self, moves):
        accepted = self._threads.consume_token_par(moves)
        self.num_moves += len(moves)
        if self.num_moves == len(moves):
            raise KeyboardInterrupt
        return accepted


def test_interrupted_call_does_not_change_later_masks(grammars, tokenizer, monkeypatch):
    threads = Interrupting()
    monkeypatch.setattr(token_filters, "_executor", lambda: threads)
    ids = tokenizer.encode('{"name": "hello", "age": 12}')
    filters = [GrammarFilter(grammars, StructuredOutputs(json=SCHEMA)) for _ in range(3)]
    compute_masks([FilterCall(one, ids[:4]) for one in filters])
    with pytest.raises(KeyboardInterrupt):
        compute_masks([FilterCall(one, ids[:5]) for one in filters])
    for length in (5, 6, 7):
        expected = GrammarFilter(grammars, StructuredOutputs(json=SCHEMA)).allowed(ids[:length])
        masks = compute_masks([FilterCall(one, ids[:length]) for one in filters])
        np.testing.assert_array_equal(masks, [expected] * 3)
    assert threads.num_moves == 9  # 3 interrupted, then 2 steps; 5 tokens at once are consumed without threads


@pytest.mark.parametrize("regex", ["[a-z ]{2,30}", "[A-Za-z0-9]{1,20}", "([a-z]+ ){2,9}!", "[a-z0-9 ,]{1,40}"])
def test_prepared_classes_do_not_change_masks(grammars, tokenizer, regex):
    other = copy.copy(grammars)
    other.core = grammars.core.with_slices([])
    one, plain = (GrammarFilter(of_slices, StructuredOutputs(regex=regex)) for of_slices in (grammars, other))
    ids = tokenizer.encode("hello worldab")
    for length in range(len(ids) + 1):
        np.testing.assert_array_equal(one.allowed(ids[:length]), plain.allowed(ids[:length]))


def test_failure_of_a_filter_does_not_change_other_masks_of_the_batch(grammars, tokenizer, monkeypatch):
    good, bad = (GrammarFilter(grammars, StructuredOutputs(choice=["hello", "no"])) for _ in range(2))
    monkeypatch.setattr(bad, "_new_tokens", lambda output_ids: 1 / 0)
    both = AllOf([good.copy(), bad], token_mask(VOCAB_SIZE, [EOS]))
    failed, mask, combined = compute_masks([FilterCall(of_call, []) for of_call in (bad, good, both)])
    assert [type(failed), type(combined)] == [ZeroDivisionError] * 2
    np.testing.assert_array_equal(mask, good.copy().allowed([]))
    with pytest.raises(ZeroDivisionError):
        both.allowed([])


def test_tokens_outside_the_grammar_allow_only_the_end(grammars, tokenizer):
    grammar = GrammarFilter(grammars, StructuredOutputs(choice=["yes", "no"]))
    assert ids_of(grammar.allowed(tokenizer.encode("yx"))) == {EOS}
    assert ids_of(grammar.allowed(tokenizer.encode("n"))) == set(tokenizer.encode("o"))


def test_min_tokens_delays_the_end(grammars, tokenizer):
    stop = tokenizer.encode("b")
    outputs = StructuredOutputs(regex="a[ab]*")
    grammar = GrammarFilter(grammars, outputs, min_tokens=3, ends=stop)
    a = tokenizer.encode("a")
    assert ids_of(grammar.allowed(a)) == {*a}
    assert ids_of(grammar.allowed(3 * a)) == {*a, *stop, EOS}
    grammar = GrammarFilter(grammars, StructuredOutputs(regex="a"), min_tokens=3)
    assert ids_of(grammar.allowed(a)) == {EOS}  # no other token is possible


def test_several_end_of_sequence_tokens(tokenizer):
    grammars = GrammarTokenizer(tokenizer, VOCAB_SIZE, [EOS, SPECIAL, VOCAB_SIZE - 1, VOCAB_SIZE + 5])
    grammar = GrammarFilter(grammars, StructuredOutputs(regex="a"))
    assert ids_of(grammar.allowed([])) == set(tokenizer.encode("a"))
    assert ids_of(grammar.allowed(tokenizer.encode("a"))) == {EOS, SPECIAL, VOCAB_SIZE - 1}


def test_model_with_fewer_tokens_than_the_tokenizer(tokenizer):
    grammars = GrammarTokenizer(tokenizer, 250, [3])
    allowed = ids_of(GrammarFilter(grammars, StructuredOutputs(regex=r"(?s:.*)")).allowed([]), 250)
    assert max(allowed) < 250


def test_byte_tokens(load_layout):
    """The tokenizer of a SentencePiece model adds a space to texts, which must not be added to forced bytes."""
    tokenizer = load_layout(files(sentencepiece()))
    grammars = GrammarTokenizer(tokenizer, VOCAB_SIZE, [2])
    grammar = GrammarFilter(grammars, StructuredOutputs(choice=["hello \u4f60", "no"]))
    _, space, *rest = tokenizer.encode("hello \u4f60", add_special_tokens=False)
    (start,) = [token for token in range(VOCAB_SIZE) if grammars.tokens[token] == b"hello"]
    ids = [start, space, *rest]
    assert len(rest) == 3
    for i, token in enumerate(ids):
        assert token in ids_of(grammar.allowed(ids[:i]))
    assert ids_of(grammar.allowed(ids)) == {2}


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_forced_bytes_are_encoded_exactly(load_layout, make):
    grammars = GrammarTokenizer(load_layout(files(make())), VOCAB_SIZE, [2])
    for text in (
        b"hello world",
        b" world",
        b"  hello",
        "\u4f60".encode(),
        "\U0001f600".encode()[:2],
        b"\xff",
        b"a",
        b"",
    ):
        ids = grammars(text)
        assert b"".join(grammars.tokens[token] for token in ids) == text
    assert len(grammars(b"hello world")) == 2


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "("}, "structured_outputs: regex: .*invalid regex"),
        ({"json": '{"type": "objec"}'}, "structured_outputs: json: Invalid type: objec"),
        ({"json": '{"type":'}, "structured_outputs: json: expected value"),
        ({"grammar": "start: (a"}, "structured_outputs: grammar: .*Expected token '\\)'"),
        ({"grammar": "start: missing"}, "structured_outputs: grammar: .*missing"),
    ],
)
def test_invalid_grammar_raises(grammars, outputs, message):
    with pytest.raises(ValueError, match=message):
        GrammarFilter(grammars, StructuredOutputs(**outputs))


def test_model_without_end_of_sequence_token_raises(tokenizer):
    with pytest.raises(ValueError, match="structured_outputs: expected a model with an end-of-sequence token"):
        GrammarTokenizer(tokenizer, VOCAB_SIZE, [])


def test_failure_of_llguidance_is_recorded(grammars, tokenizer, monkeypatch):
    limits = llguidance.LLParserLimits(step_lexer_fuel=1, initial_lexer_fuel=10**6, step_max_items=1)
    new = llguidance.LLMatcher
    grammar = GrammarFilter(grammars, StructuredOutputs(json=SCHEMA))
    source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    grammar._matcher = new(grammars.core, source, log_level=0, limits=limits)
    assert ids_of(grammar.allowed(tokenizer.encode('{"name": "hel'))) == {EOS}
    assert grammar.error


# --- combination


def test_filters_are_combined_with_and(grammars, tokenizer):
    grammar = GrammarFilter(grammars, StructuredOutputs(choice=["hello", "hi"]))
    bad = BadWords(["hello", "hi"], tokenizer, VOCAB_SIZE)
    both = AllOf([grammar, bad], token_mask(VOCAB_SIZE, [EOS]))
    h, (i,) = tokenizer.encode("h"), tokenizer.encode("i")
    (hello,) = tokenizer.encode("hello")
    assert hello in ids_of(grammar.allowed([]))
    assert ids_of(both.allowed([])) == ids_of(grammar.allowed([])) - {hello}
    assert i not in ids_of(both.allowed(h))
    only = AllOf([bad, bad], token_mask(VOCAB_SIZE, [EOS]))
    assert only.allowed([5]) is not None
    assert AllOf([BadWords(["!!"], tokenizer, VOCAB_SIZE)] * 2, token_mask(VOCAB_SIZE, [EOS])).allowed([]) is None


def test_no_common_token_allows_the_end(grammars, tokenizer):
    grammar = GrammarFilter(grammars, StructuredOutputs(choice=["ab"]))
    both = AllOf([grammar, BadWords(["ab"], tokenizer, VOCAB_SIZE)], token_mask(VOCAB_SIZE, [EOS]))
    assert ids_of(both.allowed(tokenizer.encode("a"))) == {EOS}
