"""Folders of models: local folders, and repositories in a cache of the Hugging Face Hub that the tests build."""

import json

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors, utils

from pallas_attn.models.llm import LLM, model_folder
from pallas_attn.models.llm import hub as llm_hub
from tests.models import llm_case

pytestmark = pytest.mark.usefixtures("shared_steps")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that writes a repository to an empty cache, with the Hub offline."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def add(name, write, revision="main"):
        root = folder / f"models--{name.replace('/', '--')}"
        snapshot = root / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        write(snapshot)
        (root / "refs").mkdir()
        (root / "refs" / revision).write_text(COMMIT)
        return snapshot

    return add


def no_files(folder):
    (folder / "config.json").write_text("{}")


def test_repository_in_the_cache(cache):
    snapshot = cache("acme/tiny", no_files)
    assert model_folder("acme/tiny") == snapshot
    assert model_folder("acme/tiny", revision=COMMIT) == snapshot


def test_revision(cache):
    snapshot = cache("tiny", no_files, revision="v1")
    assert model_folder("tiny", revision="v1") == snapshot
    with pytest.raises(ValueError, match="model: tiny is neither a folder nor in the cache of the Hugging Face Hub"):
        model_folder("tiny")


def test_model_of_the_cache_generates(cache):
    cache("acme/tiny", llm_case.write_model)
    with llm_case.load("acme/tiny") as llm:
        assert llm.tokenizer is not None
        assert len(llm.generate("hello")[0].token_ids) == 16


def test_only_needed_files_are_downloaded(cache, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **given: calls.append((args, given)) or "x")
    assert str(model_folder("acme/tiny", "v1")) == "x"
    ((args, given),) = calls
    assert args == ("acme/tiny",)
    assert given["revision"] == "v1"
    names = [
        *("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/a.jinja"),
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "README.md", "model.bin"),
        *("original/model.safetensors", "consolidated.safetensors", "model.gguf"),
    ]
    patterns = {"allow_patterns": given["allow_patterns"], "ignore_patterns": given["ignore_patterns"]}
    assert [*utils.filter_repo_objects(names, **patterns)] == names[:6]


def test_local_folder_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert str(model_folder("acme/tiny")) == "acme/tiny"
    with pytest.raises(ValueError, match="revision: expected None for the local folder acme/tiny, got 'v1'"):
        model_folder("acme/tiny", "v1")


@pytest.mark.parametrize("name", ["/no/folder", "./folder", "a/b/c", "", ".hidden", "a b", 3])
def test_neither_folder_nor_id_raises(name):
    with pytest.raises((ValueError, TypeError)) as error:
        model_folder(name)
    if isinstance(name, str):
        assert f"expected a folder or the id of a repository of the Hugging Face Hub, got {name!r}" in str(error.value)


def http_error(kind, status):
    import httpx2  # the HTTP client of huggingface_hub

    response = httpx2.Response(status, request=httpx2.Request("GET", "https://hub"))
    return kind("message\nsecond line", response=response)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (errors.GatedRepoError, 403, "model: access to a/b at revision v is restricted; set HF_TOKEN to the token of"),
        (errors.RevisionNotFoundError, 404, "model: the repository a/b has no revision v"),
        (errors.RepositoryNotFoundError, 404, "model: a/b at revision v is neither a folder nor a public repository"),
        (errors.HfHubHTTPError, 500, "model: a/b at revision v cannot be downloaded: message"),
    ],
)
def test_errors_of_the_hub_are_one_line(monkeypatch, kind, status, message):
    def fail(*args, **kwargs):
        raise http_error(kind, status)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as error:
        model_folder("a/b", "v")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_full_disk_is_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="model: a/b cannot be downloaded: .*No space left on device"):
        model_folder("a/b")


def test_tokenizer_of_another_folder(cache, tmp_path):
    llm_case.write_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with llm_case.load(tmp_path / "model") as llm:
        assert llm.tokenizer is None
        assert llm.generate([1, 2, 3])[0].text == ""
        for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(ValueError, match="the model has no tokenizer.json; use token ids, or give a tokenizer"):
                call()
    with llm_case.load(tmp_path / "model", tokenizer=tmp_path) as llm:
        assert llm.decode(llm.encode("hello")) == "hello"
    with pytest.raises(ValueError, match="tokenizer: expected a folder with a tokenizer.json"):
        llm_case.load(tmp_path / "model", tokenizer=tmp_path / "model")


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [(None, "float32", "float32"), ("auto", "float16", "bfloat16"), ("bfloat16", "float32", "bfloat16")],
)
def test_dtype(tmp_path, dtype, stored, expected):
    folder = llm_case.write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": stored, "torch_dtype": stored}))
    with llm_case.load(folder, dtype=dtype) as llm:
        assert llm.dtype == np.dtype(expected)


def test_invalid_arguments_raise(tmp_path):
    with pytest.raises(ValueError, match="dtype: expected auto, float32 or bfloat16, got 'int8'"):
        LLM(tmp_path, dtype="int8")
    with pytest.raises(TypeError, match="num_page"):
        LLM(tmp_path, num_page=3)
    with pytest.raises(ValueError, match="page_size: expected at least 1, got 0"):
        LLM(tmp_path, page_size=0)
    with pytest.raises(ValueError, match="config.json"):
        LLM(tmp_path)


def test_patterns_are_documented():
    assert set(llm_hub.TOKENIZER_FILES) < set(llm_hub.FILES)
