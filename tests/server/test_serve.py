"""The command `pallas-attn serve`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from pallas_attn.models.cli import serve
from pallas_attn.models.server.options import ServerLimits

ROOT = Path(__file__).parents[2]
SMALL = ("--implementation", "reference", "--dtype", "float32", "--max-num-seqs", "1", "--max-batched-tokens", "32")
SIZES = (*SMALL, "--max-model-len", "256", "--page-size", "4", "--text-workers", "1", "--compilation-cache", "off")


def test_help_has_80_columns_and_all_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    options = vars(serve.parse_options(["m"]))
    assert {field: options[field] for field in ServerLimits.__dataclass_fields__} == dataclasses.asdict(ServerLimits())
    assert {"--max-body-bytes", "--request-timeout", "--keep-alive-timeout"} <= {*printed.split()}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((), "expected MODEL or --random"),
        (("a", "--random", "v3-tiny"), "expected MODEL or --random"),
        (("/no/such/folder", "--port", "0"), "model: expected a folder or the id"),
        (("a", "--port", "65536"), "--port: expected 0 to 65535"),
        (("a", "--host", "no.such.host.invalid"), "--host, --port: cannot listen on no.such.host.invalid:8000"),
        (("a", "--max-requests", "0"), "--max-requests: expected more than 0"),
        (("a", "--request-timeout", "nan"), "--request-timeout: expected more than 0"),
        (("a", "--grace", "-1"), "--grace: expected at least 0"),
        (("a", "--text-workers", "0"), "--text-workers: expected 1 to 64"),
        (("a", "--page-size", "0"), "--page-size: expected at least 1"),
        (("a", "--api-key-file", "/no/such/file"), "--api-key-file: cannot read"),
        (("a", "--prefix-cache", "x", "--no-prefix-caching"), "--prefix-cache: not with"),
        (("--random", "v3-tiny", "--revision", "x"), "--revision: needs MODEL"),
        (("a", "--prefill-from", "b"), "--prefill-from: expected HOST:PORT with a port from 0 to 65535, got 'b'"),
        (("a", "--prefill-from", "b:1,c:65536"), "--prefill-from: expected HOST:PORT"),
        (("a", "--prefill-from", "b:1", "--prefill-listen", "1"), "--prefill-listen: not with --prefill-from"),
        (("a", "--prefill-from", "b:1", "--no-prefix-caching"), "--prefill-from: not with --no-prefix-caching"),
        (("a", "--prefill-from", "b:1", "--prefill-timeout", "0"), "--prefill-timeout: expected at least 0.001"),
        (("a", "--prefill-from", "b:1", "--prefill-min-tokens", "0"), "--prefill-min-tokens: expected at least 1"),
        (("a", "--prefill-listen", "0.0.0.0:1"), "--prefill-listen: 0.0.0.0 needs a secret: --prefill-secret-file"),
        (("a", "--prefill-listen", "1", "--prefill-secret-file", "/dev/null"), "--prefill-secret-file: /dev/null: "),
        (("a", "--prefill-listen", "1", "--prefill-secret-file", "/no/such"), "--prefill-secret-file: cannot read"),
        (("a", "--prefill-secret-file", "x"), "--prefill-secret-file: needs --prefill-from or --prefill-listen"),
        (("--random", "v3-tiny", "--port", "0", "--mesh", "tensor"), "--mesh: expected AXIS=N"),
        (("--random", "v3-tiny", "--port", "0", "--max-num-seqs", "900"), "max_num_seqs"),
    ],
)
def test_wrong_options_are_one_line(argv: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "900" in argv:
        argv = (*argv, "--max-batched-tokens", "8")
    assert serve.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pallas-attn serve: error: {reason}")


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve.main(["--random", "v3-tiny", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err


def test_keys_of_file_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("a\n\n b \n")
    monkeypatch.setenv("PALLAS_ATTN_API_KEY", "c, d")
    assert serve.parse_options(["m", "--api-key-file", str(tmp_path / "keys")]).api_keys == ["c", "d", "a", "b"]
    assert serve.parse_options(["m"]).api_keys == ["c", "d"]
    monkeypatch.delenv("PALLAS_ATTN_API_KEY")
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(Exception, match="has no key"):
        serve.parse_options(["m", "--api-key-file", str(tmp_path / "keys")])


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\tb"])
def test_keys_that_headers_cannot_have(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"c\n{key}\n", "utf-8")
    monkeypatch.setenv("PALLAS_ATTN_API_KEY", f"c,{key}")
    assert serve.main(["m"]) == 2
    monkeypatch.delenv("PALLAS_ATTN_API_KEY")
    assert serve.main(["m", "--api-key-file", str(path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    reason = "expected keys of printable ASCII characters, key 2 has others"
    assert first == f"pallas-attn serve: error: PALLAS_ATTN_API_KEY: {reason}"
    reason = f"{path}: {reason}" if key.isascii() else f"cannot read {path}: "
    assert second.startswith(f"pallas-attn serve: error: --api-key-file: {reason}")
    assert key not in first + second


def test_names_of_the_header_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Any]()
    monkeypatch.setattr(serve, "ServerOptions", lambda **options: given.append(options["allowed_hosts"]))
    monkeypatch.setattr(serve, "load", lambda *arguments: None)
    monkeypatch.setattr(serve, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(serve, "make_speculation", lambda *arguments, **options: None)
    engine = types.SimpleNamespace(max_sequence_len=8)
    monkeypatch.setattr(serve.LLM, "of_model", lambda *arguments, **options: types.SimpleNamespace(engine=engine))
    for argv in ((), ("--host", "::1"), ("--host", "0.0.0.0"), ("--host", "0.0.0.0", "--allowed-host", "a.example")):
        serve._load(serve.parse_options([str(folder), "--text-workers", "1", *argv]))
    assert given == [[], [], None, ["a.example"]]


def serve_and(use: Callable[[str], None], folder: Path, *argv: str) -> int:
    """Run the command in this process. When the server is ready, call `use` with its address in a thread, then send
    SIGTERM. Return the exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, errors = f"http://127.0.0.1:{port}", list[BaseException]()

    def client() -> None:
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end:
                try:
                    if httpx2.get(f"{url}/ready", verify=False).status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                time.sleep(0.1)
            use(url)
        except BaseException as error:  # noqa: BLE001  raised by the main thread
            errors.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if the command fails before it serves
    try:
        thread.start()
        status = serve.main([str(folder), "--port", str(port), *SIZES, *argv])
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    if errors:
        raise errors[0]
    return status


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json=body, headers=headers, timeout=60, verify=False)


def test_examples_of_the_page_and_end_by_signal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "server.md").read_text(), re.DOTALL | re.MULTILINE)
    (curl,) = [block for block in blocks if block.startswith("curl")]
    (python,) = [block for block in blocks if "import OpenAI" in block]

    def use(url: str) -> None:
        data = re.search(r"-d '(.*)'", curl)
        assert data is not None
        if shutil.which("curl"):
            done = subprocess.run(curl.replace("http://127.0.0.1:8000", url), shell=True, capture_output=True)
            assert json.loads(done.stdout)["object"] == "chat.completion"
        else:
            assert post(url, "/v1/chat/completions", json.loads(data[1])).status_code == 200
        exec(python.replace("http://127.0.0.1:8000", url), {})
        assert "prompt text" not in httpx2.get(f"{url}/metrics", verify=False).text
        assert post(url, "/v1/completions", {"prompt": "prompt text", "max_tokens": 2}).status_code == 200

    assert serve_and(use, folder, "--served-model-name", "Qwen/Qwen3-8B", "--access-log") == 0
    printed = capfd.readouterr()
    assert printed.out  # the answer that the example prints
    assert "listening on http://127.0.0.1:" in printed.err
    assert "prompt text" not in printed.err


@pytest.mark.slow  # tests/models/test_cached_pages.py saves and loads caches without a server
def test_prefix_cache_is_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    body = {"prompt": "a prompt of several pages of the cache", "max_tokens": 1}
    cached: list[int] = []

    def use(url: str) -> None:
        usage = post(url, "/v1/completions", body, Authorization="Bearer k").json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    (tmp_path / "keys").write_text("k")
    argv = ("--prefix-cache", str(tmp_path / "cache"), "--api-key-file", str(tmp_path / "keys"))
    assert serve_and(use, folder, *argv) == 0
    assert serve_and(use, folder, *argv) == 0
    assert cached[0] == 0 < cached[1]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


def test_sampling_defaults_of_the_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(json.dumps({"temperature": 0.5, "top_k": 20, "eos_token_id": 1, "do_sample": True}))
    options = serve.parse_options([str(tmp_path / "model")])
    options.model = Path(options.model)
    assert serve._defaults(options) == {"temperature": 0.5, "top_k": 20}
    config.write_text(json.dumps({"do_sample": False}))
    assert serve._defaults(options) == {"temperature": 0.0}
    options.generation_config = False
    assert serve._defaults(options) == {}
    config.write_text(json.dumps({"temperature": "hot"}))
    assert serve.main([str(tmp_path / "model"), "--port", "0", *SIZES]) == 2
    assert "generation_config.json: temperature must be" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "line"),
    [
        ("faults", 3, "the engine failed 3 times in succession: device lost"),
        ("hang", 3, "a step of the engine has not ended after 2 s"),
        ("kill HTTP server", 3, "the HTTP server has ended with status -9"),
        ("kill engine", -9, "the process of the engine has ended"),
        ("signal", 0, None),
    ],
)
def test_end_of_the_processes(folder: Path, kind: str, status: int, line: str | None) -> None:
    faults = """
import sys, time
from pallas_attn.models.llm import LLM
from pallas_attn.models.cli import serve
def step(self): raise RuntimeError("device lost")
def hang(self): time.sleep(1000)
LLM.step = {"faults": step, "hang": hang}.get(sys.argv.pop(1), LLM.step)
sys.exit(serve.main(sys.argv[1:]))
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-c", faults, kind, str(folder), "--port", str(port), *SIZES, "--grace", "0.5"]
    argv += ["--step-timeout", "2"]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        url, body = f"http://127.0.0.1:{port}", {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
        while process.poll() is None:
            try:
                if httpx2.get(f"{url}/ready", timeout=60, verify=False).status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = [child for child in children if "http_process" in " ".join(child.cmdline())]
        if kind == "faults":
            assert [post(url, "/v1/completions", body).status_code for _ in range(3)] == [500] * 3
        elif kind == "hang":
            assert post(url, "/v1/completions", body).status_code == 500
        elif kind == "kill HTTP server":
            server.kill()
        elif kind == "kill engine":
            process.kill()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == status
        assert process.stderr is not None
        printed = process.stderr.read().splitlines()  # until both processes have ended
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    if line is not None:
        assert printed[-1] == f"pallas-attn serve: error: {line}"
