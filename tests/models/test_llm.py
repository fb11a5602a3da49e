"""`LLM`: texts, chats, streams, several outputs per prompt, and errors that leave no request behind."""

import concurrent.futures
import contextlib
import gc
import json
import math
import weakref

import numpy as np
import pytest

from pallas_attn.models.engine import SamplingParams, StructuredOutputs
from pallas_attn.models.llm import LLM, Completion, Generation, OutputTimes
from pallas_attn.models.llm import llm as llm_module
from tests.models import llm_case
from tests.models.llm_case import ASSISTANT, EOS, USER

pytestmark = pytest.mark.usefixtures("shared_steps")

GREEDY = SamplingParams(max_tokens=8)
DRAWN = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
LONG = "hello world, this prompt has several pages."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llm_case.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded():
    """List with the LLM of most tests, which the first test loads."""
    llms = []
    yield llms
    for llm in llms:
        llm.close()


@pytest.fixture
def llm(folder, loaded, shared_steps):
    """The LLM of most tests. A test must not leave unfinished requests in it."""
    if not loaded:
        loaded.append(llm_case.load(folder))
    (shared,) = loaded
    yield shared
    shared.step()
    assert not shared.has_unfinished
    assert not shared.engine.has_unfinished
    assert shared.engine.stats().used_pages == 0
    assert not shared._open
    assert not shared._waiting


def engine_ids(llm, ids, params):
    """Return the tokens that the engine generates for token ids."""
    return llm.engine.generate([ids], params)[0].output_ids


# --- prompts


def test_texts_and_token_ids(llm):
    text, ids = "hello world", llm.encode("hello world")
    expected = engine_ids(llm, ids, GREEDY)
    for prompt in (text, ids, np.array(ids), tuple(ids)):
        (result,) = llm.generate(prompt, GREEDY)
        assert result.token_ids == expected
        assert result.text == llm.decode(expected)
        assert result.prompt == (text if isinstance(prompt, str) else None)
        assert result.prompt_token_ids == ids
    several = llm.generate([text, [1, 2, 3], "abc"], [GREEDY, DRAWN, SamplingParams(max_tokens=2)])
    assert [result.prompt for result in several] == [text, None, "abc"]
    assert several[0].token_ids == expected
    assert several[1].token_ids == engine_ids(llm, [1, 2, 3], DRAWN)
    assert len(several[2].token_ids) == 2


def test_no_prompts(llm):
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_default_parameters(llm):
    assert len(llm.generate("abc")[0].token_ids) == SamplingParams().max_tokens == 16


def test_encode_and_decode(llm):
    assert llm.encode("<user>hello") == [USER, *llm.encode("hello")]
    assert llm.decode([USER, *llm.encode("hello"), EOS]) == "hello"
    assert llm.decode([USER, *llm.encode("hello")], skip_special_tokens=False) == "<user>hello"


def test_chat_uses_the_template(llm):
    turns = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "again"},
    ]
    (result,) = llm.chat(turns, GREEDY)
    assert result.prompt == "short<user>hello<assistant>hi<user>again<assistant>"
    assert result.prompt_token_ids.count(USER) == result.prompt_token_ids.count(ASSISTANT) == 2
    assert result.token_ids == engine_ids(llm, result.prompt_token_ids, GREEDY)
    one, two = llm.chat([turns[:2], turns], GREEDY)
    assert (one.prompt, two.prompt) == ("short<user>hello<assistant>", result.prompt)
    (result,) = llm.chat(turns[1:2], GREEDY, tools=[{"name": "f"}], suffix="!", add_generation_prompt=False)
    assert result.prompt == '{"name": "f"}<user>hello!'
    (result,) = llm.chat(turns[1:2], GREEDY, chat_template="{{ messages[0].content }}{{ eos_token }}")
    assert result.prompt == "hello</s>"
    with llm.stream(turns[1:2], GREEDY, suffix="?") as stream:
        assert stream.generation.prompt == "<user>hello?<assistant>"


# --- results


def test_result_fields(llm):
    (result,) = llm.generate(LONG, SamplingParams(max_tokens=4, logprobs=2))
    assert isinstance(result, Generation)
    (output,) = result.outputs
    assert isinstance(output, Completion)
    assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)
    assert (result.text, result.token_ids, result.finish_reason) == (output.text, output.token_ids, "length")
    assert result.finished
    assert isinstance(output.timing, OutputTimes)
    first, total = output.timing.first_token_s, output.timing.total_s
    assert output.timing.queue_s is not None
    assert 0 <= output.timing.queue_s < (first or 0.0)
    assert first is not None
    assert total is not None
    assert 0 < first <= total


def test_logprobs(llm):
    params = SamplingParams(max_tokens=5, temperature=1.5, seed=3, logprobs=2)
    (result,) = llm.generate("hello world abc", params)
    (output,) = result.outputs
    assert len(output.logprobs) == 5
    for token, table in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(table)) == token
        assert 2 <= len(table) <= 3
        assert {entry.rank for entry in table.values()} >= {1, 2}
        for other, entry in table.items():
            assert entry.logprob <= 0
            assert entry.decoded_token == llm.decode([other], skip_special_tokens=False)
    expected = math.fsum(table[token].logprob for token, table in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(expected)
    (plain,) = llm.generate("abc", GREEDY)[0].outputs
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None


def test_prompt_logprobs(llm):
    prompt = "the prompt of this test"
    params = SamplingParams(max_tokens=3, temperature=1.0, n=2, prompt_logprobs=1)
    for _ in range(2):  # the second time, the prompt is in the prefix cache
        (result,) = llm.generate(prompt, params)
        assert result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
        for token, table in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
            assert next(iter(table)) == token
            assert 1 in {entry.rank for entry in table.values()}
    assert llm.generate(prompt, GREEDY)[0].prompt_logprobs is None


def test_cached_tokens(llm):
    prompt = "a prompt that no other test has"
    length, page = len(llm.encode(prompt)), llm.engine.config.page_size
    (first,) = llm.generate(prompt, GREEDY)
    (second,) = llm.generate(prompt, GREEDY)
    assert (first.cached_tokens, second.cached_tokens) == (0, (length - 1) // page * page)


# --- stop conditions


def test_stop_text_ends_the_request(llm):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
    (whole,) = llm.generate("hello", params)
    start = next(i for i in range(3, len(whole.text)) if "\ufffd" not in whole.text[i : i + 2])
    stop = whole.text[start : start + 2]
    expected = whole.text[: whole.text.index(stop)]
    launched = llm.engine.stats().num_steps
    (result,) = llm.generate("hello", SamplingParams(max_tokens=24, temperature=1.0, seed=1, stop=["no", stop]))
    assert (result.text, result.finish_reason, result.outputs[0].stop_reason) == (expected, "stop", stop)
    number = len(result.token_ids)
    assert result.token_ids == whole.token_ids[:number]
    assert number < 24
    assert llm.engine.stats().num_steps - launched <= number + 2  # the request was aborted
    included = SamplingParams(max_tokens=24, temperature=1.0, seed=1, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("hello", included)[0].text == expected + stop
    late = SamplingParams(max_tokens=24, temperature=1.0, seed=1, stop=stop, min_tokens=number)
    assert llm.generate("hello", late)[0].token_ids[: number + 1] == whole.token_ids[: number + 1]


def test_end_of_sequence_token_ends_the_request(llm):
    params = SamplingParams(max_tokens=8, allowed_token_ids=[EOS])
    (result,) = llm.generate("hello", params)
    assert (result.text, result.token_ids, result.finish_reason) == ("", [EOS], "stop")
    params = SamplingParams(max_tokens=3, allowed_token_ids=[EOS], ignore_eos=True, skip_special_tokens=False)
    (result,) = llm.generate("hello", params)
    assert (result.text, result.finish_reason) == ("</s></s></s>", "length")


def test_stop_token_is_the_stop_reason(llm):
    (a,) = llm.encode("a")
    params = SamplingParams(max_tokens=8, allowed_token_ids=[a], stop_token_ids=[a], min_tokens=0)
    (output,) = llm.generate("hello", params)[0].outputs
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("", [a], "stop", a)


# --- filters


def test_bad_words(llm):
    a, b = llm.encode("ab")
    params = {"max_tokens": 12, "temperature": 1.0, "allowed_token_ids": [a, b], "seed": 2}
    assert "ba" in llm.generate("hello", SamplingParams(**params))[0].text
    (result,) = llm.generate("hello", SamplingParams(**params, bad_words=["ba", "aaa"]))
    assert len(result.text) == 12
    assert "ba" not in result.text
    assert "aaa" not in result.text


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_structured_outputs(llm, temperature):
    params = {"max_tokens": 60, "temperature": temperature}
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "hello"]}}, "required": ["a"]}
    (result,) = llm.generate("abc", SamplingParams(**params, structured_outputs=StructuredOutputs(json=schema)))
    if result.finish_reason == "stop":
        assert json.loads(result.text)["a"] in ("x", "hello")
        assert result.token_ids[-1] == EOS
    (result,) = llm.generate(
        "abc", SamplingParams(**params, structured_outputs=StructuredOutputs(choice=["yes", "\u4f60"]))
    )
    assert (result.text in ("yes", "\u4f60"), result.finish_reason) == (True, "stop")
    (result,) = llm.generate(
        "abc", SamplingParams(**params, structured_outputs=StructuredOutputs(regex="[a-c]{3}"), min_tokens=30)
    )
    assert len(result.text) == 3
    assert set(result.text) <= set("abc")


def test_bad_words_and_grammar(llm):
    params = SamplingParams(
        max_tokens=9, structured_outputs=StructuredOutputs(choice=["yes", "no"]), bad_words=["no", "n"]
    )
    (result,) = llm.generate("abc", params)
    assert (result.text, result.finish_reason) == ("yes", "stop")


def test_failed_grammar_aborts_the_request(llm, monkeypatch):
    made = []

    class Failing(llm_module.GrammarFilter):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def _new_tokens(self, output_ids):
            if len(output_ids) == 2:
                self.error = "too complex"
            return super()._new_tokens(output_ids)

    monkeypatch.setattr(llm_module, "GrammarFilter", Failing)
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="a*b"), bad_words=["b"])
    one, other = llm.generate(["abc", "hello"], [params, GREEDY])
    assert len(made) == 1
    assert (one.text, one.finish_reason, one.outputs[0].stop_reason) == ("aa", "abort", "too complex")
    assert other.finish_reason == "length"


# --- several outputs


def test_outputs_have_seeds_in_order_and_share_the_prompt(llm):
    prompt, page = "several outputs share the pages of this prompt", llm.engine.config.page_size
    ids = llm.encode(prompt)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=2**32 - 2, n=4, logprobs=0)
    (result,) = llm.generate(prompt, params)
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    full = (len(ids) - 1) // page * page
    assert [output.cached_tokens for output in result.outputs] == [0, full, full, full]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4
    for output, seed in zip(result.outputs, (2**32 - 2, 2**32 - 1, 0, 1), strict=True):
        assert output.token_ids == engine_ids(llm, ids, SamplingParams(max_tokens=6, temperature=1.0, seed=seed))


def test_outputs_use_the_pages_of_the_prompt_once(llm):
    """The outputs own the full pages of the prompt together, and other pages separately."""
    page = llm.engine.config.page_size
    prompt = [*range(200, 200 + 10 * page), 7]
    most = 0
    stream = llm.stream(prompt, SamplingParams(max_tokens=page, temperature=1.0, n=4))
    for _ in stream:
        most = max(most, llm.engine.stats().used_pages)
    assert most <= 10 + 4 * 2  # without sharing: 4 · 12
    assert [output.cached_tokens for output in stream.generation.outputs] == [0, *[10 * page] * 3]


def test_outputs_of_a_short_prompt_start_together(llm):
    stream = llm.stream([1, 2], SamplingParams(max_tokens=3, temperature=1.0, n=3))
    assert len(llm._open) == 3
    assert sorted(delta.index for delta in stream) == sorted([0, 1, 2] * 3)


def test_stop_text_ends_one_output_only(llm):
    params = {"max_tokens": 20, "temperature": 1.0, "n": 3, "seed": 8}
    (whole,) = llm.generate(LONG, SamplingParams(**params))
    stop = whole.outputs[1].text[4]
    (result,) = llm.generate(LONG, SamplingParams(**params, stop=stop))
    for output, before in zip(result.outputs, whole.outputs, strict=True):
        assert output.text == before.text.partition(stop)[0]


# --- streams


def gather(deltas):
    """Return text and tokens of a stream with one output, and check the deltas."""
    deltas = list(deltas)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert deltas[-1].finish_reason is not None
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, SamplingParams(max_tokens=20, temperature=1.0, seed=2, stop="e")])
def test_stream_gives_the_result_of_generate(llm, params):
    (result,) = llm.generate(LONG, params)
    stream = llm.stream(LONG, params)
    assert gather(stream) == (result.text, result.token_ids)
    assert stream.is_finished
    assert stream.generation.outputs[0].text == result.text
    assert list(stream) == []


def test_stream_of_several_outputs(llm):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, n=3)
    (result,) = llm.generate(LONG, params)
    deltas = list(llm.stream(LONG, params))
    for output in result.outputs:
        text, tokens = gather(delta for delta in deltas if delta.index == output.index)
        assert (text, tokens) == (output.text, output.token_ids)


def test_stream_with_logprobs(llm):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, logprobs=1, n=2)
    (result,) = llm.generate(LONG, params)
    tables = {0: [], 1: []}
    for delta in llm.stream(LONG, params):
        assert [next(iter(table)) for table in delta.logprobs] == delta.token_ids
        tables[delta.index] += delta.logprobs
    for output in result.outputs:
        for one, other in zip(tables[output.index], output.logprobs, strict=True):
            assert one.keys() == other.keys()


def test_streams_interleave(llm):
    prompts = ["hello", "abc", LONG]
    expected = [(result.text, result.token_ids) for result in llm.generate(prompts, DRAWN)]
    streams = [llm.stream(prompt, DRAWN) for prompt in prompts]
    deltas = [[next(stream)] for stream in streams]
    (between,) = llm.generate("hello world", GREEDY)  # other calls run the streams' requests, too
    assert between.token_ids == engine_ids(llm, llm.encode("hello world"), GREEDY)
    for of_one, stream in [*zip(deltas, streams, strict=True)][::-1]:
        of_one += stream
    assert [gather(of_one) for of_one in deltas] == expected


def test_take_does_not_run_the_engine(llm):
    stream = llm.stream("hello", GREEDY)
    assert stream.take() == []
    steps = llm.engine.stats().num_steps
    while llm.has_unfinished:
        llm.step()
    assert llm.engine.stats().num_steps > steps
    deltas = stream.take()
    assert gather(deltas) == (llm.generate("hello", GREEDY)[0].text, stream.generation.token_ids)
    assert stream.take() == []


def test_closed_stream_has_the_results_of_aborted_outputs(llm):
    with llm.stream("abc", SamplingParams(max_tokens=60, logprobs=1)) as stream:
        next(stream)
    (output,) = stream.generation.outputs
    assert output.finish_reason == "abort"
    assert output.token_ids
    assert len(output.logprobs) == len(output.token_ids)
    assert output.timing.total_s is not None


def test_exception_while_later_outputs_are_added(llm, monkeypatch):
    """The next step adds the outputs that an interrupted step has not added."""
    params = SamplingParams(max_tokens=4, temperature=1.0, n=3, ignore_eos=True)
    stream, right, calls = llm.stream(LONG, params), llm.engine.add_request, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*args, **options)

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    list(stream)
    assert [output.finish_reason for output in stream.generation.outputs] == ["length"] * 3
    assert len(calls) == 3  # the second output once, the third twice


@pytest.mark.parametrize("how", ["close", "with", "delete", "exception"])
def test_abandoned_stream_aborts_its_requests(llm, how):
    other = llm.stream("abc", DRAWN)
    stream = llm.stream(LONG, SamplingParams(max_tokens=60, temperature=1.0, n=3))
    next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    elif how == "exception":

        def consume(deltas):
            for _ in deltas:
                raise RuntimeError("user code")

        with contextlib.suppress(RuntimeError):
            consume(stream)
    del stream
    assert gather(other)[1] == llm.generate("abc", DRAWN)[0].token_ids


def test_exception_in_generate_leaves_no_request(llm, monkeypatch):
    other = llm.stream("abc", DRAWN)
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([LONG, "hello"], SamplingParams(max_tokens=30))
    assert len(llm._open) == 1
    assert gather(other)[1] == llm.generate("abc", DRAWN)[0].token_ids


def test_lost_tokens_are_read_from_the_engine(llm, monkeypatch):
    """KeyboardInterrupt may end `Engine.step` just before it calls the callback of a token."""
    expected = llm.generate("hello", DRAWN)[0]
    stream = llm.stream("hello", DRAWN)
    sequence = stream._prompt.sequences[0]
    add, seen = sequence.text.add, []

    def losing(token, reason):
        seen.append(token)
        if len(seen) != 4:
            add(token, reason)

    monkeypatch.setattr(sequence.text, "add", losing)
    deltas = list(stream)
    assert stream.generation.token_ids == expected.token_ids
    assert stream.generation.text == expected.text
    assert deltas[-1].finish_reason == "length"


def test_request_that_is_aborted_in_the_engine_ends(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=60))
    first = next(stream)
    llm.engine.abort(stream._prompt.sequences[0].request_id)
    rest = list(stream)
    assert rest[-1].finish_reason == "abort"
    assert stream.generation.token_ids == [token for delta in (first, *rest) for token in delta.token_ids]


def test_aborted_request_gets_its_last_delta_in_the_next_step(llm):
    aborted, other = (llm.stream(text, SamplingParams(max_tokens=60)) for text in ("hello", "world"))
    next(aborted)
    llm.engine.abort(aborted._prompt.sequences[0].request_id)
    llm.step()
    assert aborted.take()[-1].finish_reason == "abort"
    assert llm.has_unfinished
    other.close()


def test_nonfinite_logits_end_the_request(llm):
    stream = llm.stream("hello", GREEDY)
    sequence = stream._prompt.sequences[0]
    llm_module._receive(llm._open, llm._ended, sequence.request_id, -1, "nonfinite")
    assert sequence.text.finish_reason == "nonfinite"
    assert [*llm._ended] == [sequence]
    stream.close()


# --- errors


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "params: expected one for each of 2 prompts, got 1"),
        (lambda llm: llm.generate("a", 3), "params: expected SamplingParams"),
        (lambda llm: llm.generate("a", [None]), "params: expected SamplingParams or None, got None"),
        (lambda llm: llm.generate(3), "prompts: expected texts or token ids, got 3"),
        (lambda llm: llm.generate([{"role": "user", "content": "a"}]), "prompts: expected texts .*; use `chat`"),
        (lambda llm: llm.generate([[{"role": "user", "content": "a"}]]), "prompts: expected texts .*; use `chat`"),
        (lambda llm: llm.generate(["a", 3.5]), "prompt 1 must be a sequence of integers, got 3.5"),
        (lambda llm: llm.generate(["a", [1, "b"]]), "prompt 1 must be a sequence of integers"),
        (lambda llm: llm.generate([[1], []]), "prompt 1: expected at least one token, got none"),
        (lambda llm: llm.generate(["a", ""]), "prompt 1: expected at least one token, got none"),
        (lambda llm: llm.generate(["abc", [5] * 128]), "prompt 1: the prompt has 128 tokens, the model takes at most"),
        (lambda llm: llm.generate([[5, 10**6]]), "expected ids from 0 to 287, got 1000000"),
        (lambda llm: llm.generate("\ud800"), "expected text in UTF-8"),
        (lambda llm: llm.chat("hello"), "messages: expected a list of messages or of chats, got 'hello'"),
        (lambda llm: llm.chat([["a"]]), "messages: expected a list of objects, got 'a' as entry 0"),
        (lambda llm: llm.stream([]), "prompt: expected at least one token, got none"),
        (lambda llm: llm.stream("a", [GREEDY]), "params: expected SamplingParams or None, got"),
        (
            lambda llm: llm.stream("a", SamplingParams(structured_outputs=StructuredOutputs(regex="("))),
            "structured_outputs: regex: .*invalid regex",
        ),
    ],
)
def test_invalid_argument_queues_nothing(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert not llm.has_unfinished
    assert not llm.engine.has_unfinished


# --- life of the object


def test_close_aborts_and_frees_the_engine(folder):
    llm = llm_case.load(folder)
    stream = llm.stream("hello", SamplingParams(max_tokens=50))
    next(stream)
    engine = weakref.ref(llm.engine)
    llm.close()
    llm.close()
    gc.collect()
    assert engine() is None
    for call in (lambda: llm.generate("a"), lambda: next(stream), lambda: llm.stream("a"), llm.step):
        with pytest.raises(ValueError, match="the LLM is closed"):
            call()
    stream.close()


def test_last_reference_frees_the_engine(folder):
    gc.disable()  # no cycle refers to the engine
    try:
        llm = llm_case.load(folder)
        llm.generate("hello", SamplingParams(max_tokens=2))
        engine = weakref.ref(llm.engine)
        del llm
        assert engine() is None
    finally:
        gc.enable()


def test_model_in_memory(folder, llm):
    from pallas_attn.models.checkpoints import load_model, load_tokenizer
    from pallas_attn.models.engine import EngineConfig

    model = load_model(folder, settings=llm_case.QUICK)
    other = LLM.of_model(model, EngineConfig(**llm_case.SIZES, history=1), tokenizer=load_tokenizer(folder))
    prompts = ["hello", "abc", LONG, "x"]
    results = other.generate(prompts, DRAWN)
    assert [r.token_ids for r in results] == [r.token_ids for r in llm.generate(prompts, DRAWN)]


@pytest.mark.slow
def test_drafts_change_no_result(folder, llm):
    """With drafts, several tokens arrive per step, also after a stop text, and filters get rejected drafts."""
    from pallas_attn.models.engine import NGramProposer, Speculation

    schema = {"type": "array", "items": {"enum": ["hello", "x"]}, "minItems": 3, "maxItems": 6}
    (a, b) = llm.encode("ab")
    drawn = {"max_tokens": 30, "temperature": 1.0, "seed": 3}
    each = [
        SamplingParams(**drawn, structured_outputs=StructuredOutputs(json=schema)),
        SamplingParams(**drawn, allowed_token_ids=[a, b], stop="bbb", n=2),
        SamplingParams(**drawn, allowed_token_ids=[a, b], bad_words=["aba"], logprobs=1),
        SamplingParams(**drawn, n=3),
    ]
    prompts = [LONG, "abababab", "abaababa", "abc"]
    expected = llm.generate(prompts, each)
    speculate = Speculation(NGramProposer(), num_drafts=3, adaptive=False)
    with llm_case.load(folder, speculate=speculate) as other:
        results = other.generate(prompts, each)
        assert other.engine.stats().accepted_tokens > 0
    for result, plain in zip(results, expected, strict=True):
        for output, before in zip(result.outputs, plain.outputs, strict=True):
            assert (output.text, output.finish_reason) == (before.text, before.finish_reason)
            assert output.token_ids == before.token_ids
            assert (output.logprobs is None) == (before.logprobs is None)
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)


# --- prepared prompts


def test_prompt_prepared_in_another_thread(llm):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, structured_outputs=StructuredOutputs(regex="[ab]+"))
    expected = llm.generate(LONG, params)[0].text
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        prepared = [*threads.map(lambda prompt: llm.prepare(prompt, params), [LONG, llm.encode(LONG)] * 4)]
    assert [prompt.text for prompt in prepared[:2]] == [LONG, None]
    streams = [llm.add(prompt) for prompt in prepared]
    for stream in streams:
        assert "".join(delta.text for delta in stream) == expected
    for wrong in ([], [1.5], {"role": "user"}):
        with pytest.raises(ValueError, match="prompt"):
            llm.prepare(wrong)
    with pytest.raises(ValueError, match="regex"):
        llm.prepare("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))


def test_prefixes_are_shared_with_the_same_salt_only(llm):
    prompt = "a prompt of several pages for salts"

    def cached(salt):
        stream = llm.add(llm.prepare(prompt, GREEDY), salt=salt)
        assert [*stream][-1].finish_reason == "length"
        return stream.cached_tokens

    assert [cached(salt) > 0 for salt in ("x", "x", "y", "")] == [False, True, False, False]


def test_deltas_with_logprobs_do_not_copy_earlier_tokens(llm, monkeypatch):
    params = SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=0)
    expected = llm.generate(LONG, params)[0]
    calls = []
    output = llm.engine.output
    monkeypatch.setattr(llm.engine, "output", lambda request_id: calls.append(request_id) or output(request_id))
    stream = llm.stream(LONG, params)
    deltas = [*stream]
    assert [entry for delta in deltas for entry in delta.logprobs] == expected.outputs[0].logprobs
    assert len(calls) == 2  # when it is added, and when it has ended
    assert stream.prompt_logprobs == expected.prompt_logprobs


def test_bad_words_and_grammars_are_compiled_once_per_prompt(llm, monkeypatch):
    params = SamplingParams(
        max_tokens=6, temperature=1.0, n=3, bad_words=["b"], structured_outputs=StructuredOutputs(regex="[abc]+")
    )
    expected = [output.text for output in llm.generate(LONG, params)[0].outputs]
    made = []
    words, matcher = llm_module.BadWords.__init__, type(llm.grammars).matcher
    monkeypatch.setattr(llm_module.BadWords, "__init__", lambda self, *rest: made.append("words") or words(self, *rest))
    monkeypatch.setattr(
        type(llm.grammars), "matcher", lambda self, outputs: made.append("grammar") or matcher(self, outputs)
    )
    result = llm.generate(LONG, params)[0]
    assert made == ["words", "grammar"]
    assert [output.text for output in result.outputs] == expected
    assert all("b" not in text and set(text) <= {"a", "c"} for text in expected)
