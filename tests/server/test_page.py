"""The page of the server in a headless browser: chat, charts, narrow screens, and no other hosts."""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.server_case import NAME, Running, load, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, for example Debian's package"),
]

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
HTML = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>"


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Running]:
    llm = load(folder)
    step = llm.step

    def slow_step() -> None:  # an answer takes long enough to be stopped
        time.sleep(0.02)
        step()

    llm.step = slow_step
    with serving(folder, llm=llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Return a function that opens the page. At the end, check its requests and errors."""
    contexts, urls, errors = [], [], []

    def open_page(**options: Any):
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: urls.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(server.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert urls
    assert all(url.startswith(f"{server.url}/") for url in urls), urls
    ignored = ("favicon.ico", "status of 400", "status of 404", "ERR_FAILED")  # also of requests that a test lets fail
    assert [error for error in errors if not any(text in error for text in ignored)] == []


def ask(page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page) -> list[str]:
    return page.locator(".message.assistant > .text:not(.call)").all_text_contents()


def wait_for_end(page) -> None:
    sync_api.expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=30_000)


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition. The security policy of the page forbids `Page.wait_for_function`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def set_fields(page, **values: str) -> None:
    if not page.locator("#settings").evaluate("(details) => details.open"):
        page.get_by_text("Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)


def test_answers_equal_the_api(open_page, server):
    page = open_page()
    sync_api.expect(page.locator("#model")).to_have_text(NAME)
    set_fields(page, System_prompt="be", Temperature="0", Max_tokens="12", Top_p="0.9")
    messages = [{"role": "system", "content": "be"}]
    for number, text in enumerate([HTML, "b"]):
        ask(page, text)
        wait_for_end(page)
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, "top_p": 0.9}
        with server.client() as client:
            content = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert answers(page)[number] == content
        messages.append({"role": "assistant", "content": content})
    assert page.locator(".message.user > .text").all_text_contents() == [HTML, "b"]
    assert page.locator("#messages img, #messages script").count() == 0
    assert page.title() == "pallas_attn"
    assert re.search(r"\d+ prompt tokens, 12 generated tokens, [\d.]+ tokens/s", page.inner_text("#messages"))


def test_answer_streams_and_stops(open_page, server):
    page = open_page()
    set_fields(page, Temperature="0", Max_tokens="80")
    ask(page, "a")
    wait_until(lambda: "".join(answers(page)))
    first = answers(page)[0]
    wait_until(lambda: len(answers(page)[0]) > len(first))
    assert answers(page)[0].startswith(first)
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    assert page.inner_text(".message.assistant .note") == "Stopped."
    server.wait_until_idle()
    set_fields(page, Max_tokens="3")
    ask(page, "b")
    wait_for_end(page)
    assert len(answers(page)) == 2


def test_reload_during_an_answer(open_page, server):
    page = open_page()
    set_fields(page, Max_tokens="80", API_key="secret")
    page.get_by_label("API key").blur()
    ask(page, "a")
    page.wait_for_selector(".message.assistant .text")
    page.reload()
    server.wait_until_idle()
    assert page.locator(".message").count() == 0
    assert page.get_by_label("API key").input_value() == "secret"
    set_fields(page, Max_tokens="3")
    ask(page, "b")
    wait_for_end(page)
    assert len(answers(page)) == 1


def test_charts_show_the_metrics(open_page, server):
    page = open_page()
    sync_api.expect(page.locator("#state")).to_have_text("Connected")
    # Equal prompts of several pages, for hits of the prefix cache. The page reads the metrics once per second.
    body = {"prompt": "hello world " * 8, "max_tokens": 40, "n": 4, "ignore_eos": True}
    is_done = threading.Event()

    def generate(client) -> None:
        while not is_done.is_set():
            assert client.post("/v1/completions", json=body).status_code == 200

    with concurrent.futures.ThreadPoolExecutor(1) as pool, server.client() as client:
        generating = pool.submit(generate, client)
        try:
            for name, unit in [("running", ""), ("tokens", " tokens/s"), ("pages", " %"), ("hits", " %")]:
                wait_until(lambda name=name, unit=unit: float(page.inner_text(f"#{name}").removesuffix(unit)) > 0)
        finally:
            is_done.set()
        generating.result()
    assert page.locator("canvas").count() == 4
    for label in page.locator("canvas").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))"):
        assert "of the last 2 minutes. Now " in label
    page.route("**/metrics", lambda route: route.abort())
    sync_api.expect(page.locator("#state")).to_contain_text("No metrics")


def events(*deltas: dict[str, Any], reason: str = "stop") -> str:
    """Return the body of a stream."""
    choices: list[dict[str, Any]] = [*({"index": 0, "delta": delta, "finish_reason": None} for delta in deltas)]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    lines = [json.dumps({"choices": [choice]}) for choice in choices]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def test_reasoning_and_tool_calls(open_page):
    page = open_page()
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "clock", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    bodies = [
        events(
            {"reasoning_content": f"Hm {HTML}"}, {"tool_calls": [call]}, {"tool_calls": [more]}, reason="tool_calls"
        ),
        events({"content": HTML}),
    ]
    sent: list[dict[str, Any]] = []

    def fulfill(route) -> None:
        sent.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=bodies[len(sent) - 1])

    page.route("**/v1/chat/completions", fulfill)
    set_fields(page, **{"Tools (JSON list)": '[{"type": "function", "function": {"name": "clock"}}]'})
    ask(page, "a")
    wait_for_end(page)
    assert page.locator(".message details").evaluate("(details) => details.open") is False
    assert page.locator(".message details .text").text_content() == f"Hm {HTML}"
    assert page.inner_text(".call") == 'clock {"a": 1}'
    assert page.get_by_label("Message").get_attribute("placeholder") == "Result of clock"
    ask(page, "12:00")
    wait_for_end(page)
    assert answers(page) == [HTML]
    assert page.title() == "pallas_attn"
    assert sent[0]["tools"] == [{"type": "function", "function": {"name": "clock"}}]
    _, assistant, tool = sent[1]["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"a": 1}'}
    assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}


def test_errors_are_shown(open_page):
    page = open_page()
    set_fields(page, Max_tokens="100000")
    ask(page, "a")
    wait_for_end(page)
    assert "max_tokens" in page.inner_text(".message .error")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body='data: {"error": {"message": "broken"}}\n\n'))
    ask(page, "b")
    wait_for_end(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: {}\n\n"))
    ask(page, "c")
    wait_for_end(page)
    shown = page.locator(".message .error").all_text_contents()
    assert shown[1:] == ["broken", "The connection has ended before the answer."]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_layout(open_page, size, scheme, tmp_path):
    """Nothing is wider than the screen, all fields have labels, and the colors have enough contrast."""
    page = open_page(viewport=size, color_scheme=scheme)
    set_fields(page, Max_tokens="30")
    ask(page, "a long word: " + "x" * 60)
    wait_for_end(page)
    wait_until(lambda: float(page.inner_text("#tokens").removesuffix(" tokens/s")) > 0)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    unlabeled = "[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"
    assert page.evaluate(unlabeled) == 0
    colors = "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
    assert contrast(*page.evaluate(colors)) > 7
    page.screenshot(path=tmp_path / "page.png", full_page=True)


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colors as in WCAG 2, from 1 to 21."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
