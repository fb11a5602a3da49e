"""The client that measures HTTP servers, and the script that measures the server next to the offline engine."""

import asyncio
import json

import pytest

from scripts import bench_server
from scripts.bench.engine.http_load import Load, TimedReply, measure, quantiles, summary

EVENTS = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": ""}]},
    {"choices": [{"text": "b"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


def served(answers: list[bytes], load: Load) -> dict:
    """Measure a server that answers its n-th connection with the n-th text."""

    async def run() -> dict:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert json.loads(await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0])))
            writer.write(answers.pop(0))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            return await measure(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", load)

    return asyncio.run(run())


def test_failed_and_truncated_responses_are_counted():
    events = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS)
    head, done = b"HTTP/1.1 200 OK\r\n\r\n", b"data: [DONE]\n\n"
    error = b'data: {"error": {"message": "m"}}\n\n'
    answers = [head + events + done, head + events, head + error + done, b"HTTP/1.1 429 Too Many\r\n\r\n"]
    result = served(answers, Load("users", 4, 8, 3, vocab_size=100, users=1))
    assert (result["failed"], result["output_tokens"]) == (3, 3)
    assert set(result["ttft_s"]) == {"p50", "p90", "p99"}
    assert any("429" in text for text in result["errors"])


def test_prompts_share_a_prefix_and_depend_on_the_seed():
    load = Load("arrivals", 3, 10, 4, vocab_size=1000, rate=100.0, shared_tokens=6)
    prompts = [body["prompt"] for body in load.bodies()]
    assert [len(prompt) for prompt in prompts] == [10] * 3
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert load.bodies() == load.bodies()


def test_time_to_first_token_and_time_between_tokens():
    replies = [TimedReply(0.0, [1.0, 1.5, 2.5], 3), TimedReply(1.0, [4.0], 1), TimedReply(0.0, [], 0, "failed")]
    result = summary(replies, 2.0)
    assert (result["output_tokens_per_s"], result["failed"]) == (2.0, 1)
    assert result["ttft_s"] == {"p50": 1.0, "p90": 3.0, "p99": 3.0}
    assert result["between_tokens_s"]["p99"] == 1.0
    assert quantiles([]) == {}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--step-tokens", "4"], "--step-tokens: expected at least --max-num-seqs"),
        (["--mesh", "tensor"], "--mesh: expected AXIS=N"),
        (["--mesh", "tensor=2", "--paced", "20"], "--mesh: expected neither --paced"),
    ],
)
def test_wrong_options_exit_with_status_2(wrong, named, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_server.parse_args(wrong)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_impossible_mesh_is_an_error(capsys):
    assert bench_server.main(["--config", "v3-tiny", "--mesh", "tensor=3"]) == 2
    assert "bench_server: error: --mesh: mesh: tensor: devices" in capsys.readouterr().err


def test_share_of_the_offline_rate():
    offline, served = {"name": "offline users", "users": 4}, {"name": "users", "users": 4}
    results = [offline | {"output_tokens_per_s": 200.0}, served | {"output_tokens_per_s": 150.0}, {"name": "arrivals"}]
    assert [result.get("of_offline") for result in bench_server.compared(iter(results))] == [None, 0.75, None]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[], ["--mesh", "data=2,tensor=2"]])
def test_measurements_of_a_tiny_model(tmp_path, mesh):
    out = tmp_path / "out.json"
    sizes = ["--users", "2", "--rounds", "1", "--rates", "20", "--requests", "3", "--json-users", "1"]
    sizes += ["--prompt-tokens", "12", "--shared-tokens", "20", "--new-tokens", "6", "--max-num-seqs", "4"]
    options = ["--config", "v3-tiny", "--dtype", "float32", "--step-tokens", "32", "--json", str(out)]
    assert bench_server.main([*options, *sizes, *mesh]) == 0
    report = json.loads(out.read_text())
    results = report["results"]
    assert results[0]["devices"] == (4 if mesh else 1)
    assert [result["name"] for result in results if result.get("failed", 0) == 0] == [
        *("warmup", "offline warm-up", "offline users", "warm-up", "users", "arrivals", "shared prefix", "JSON")
    ]
    assert all(result["output_tokens"] for result in results[1:])


@pytest.mark.slow
def test_paced_device_measures_offline_and_server(tmp_path):
    out = tmp_path / "out.json"
    options = ["--config", "v3-tiny", "--dtype", "float32", "--paced", "2", "--users", "2", "--rounds", "2"]
    options += ["--prompt-tokens", "8", "--shared-tokens", "8", "--new-tokens", "6", "--max-num-seqs", "4"]
    assert bench_server.main([*options, "--step-tokens", "32", "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [result["name"] for result in results] == ["offline warm-up", "offline users", "warm-up", "users"]
    offline, users = results[1], results[3]
    assert (users["failed"], users["output_tokens"], offline["output_tokens"]) == (0, 2 * 2 * 6, 2 * 2 * 6)
    assert users["of_offline"] == users["output_tokens_per_s"] / offline["output_tokens_per_s"]
    assert min(users["event_loop_us"], users["engine_thread_us"], offline["engine_thread_us"]) > 0
