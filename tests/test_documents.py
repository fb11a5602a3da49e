"""Tests of the documentation: files, names and flags in the text exist, examples run, and tables match result files."""

import contextlib
import functools
import io
import json
import re
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn
from pallas_attn import cache
from pallas_attn.models.cli import serve
from pallas_attn.runtime import device, dispatch
from scripts.tools import performance
from scripts.tools.readme_example import python_blocks
from tests.kit.slow_cases import slow_cases

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "BUILD.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
FOLDERS = ("pallas_attn", "models", "scripts", "tests", "benchmarks", "docs")

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./<>-]*\w\.(?:py|md|json|txt|toml|svg|png|yml)(?![\w(])")
NAME = re.compile(r"(?<![\w/.])(?:pallas_attn|pa)\.([A-Za-z]\w*)(?![\w/]*\.(?:py|md))")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
TARGET = re.compile(r"\bmake ([a-z]+(?:-[a-z]+)*)\b")
FOREIGN_FLAGS = ("--xla", "--help", "--tasks")  # "--tasks" of lm_eval
FOREIGN_FILES = (
    *("config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("ids.json", "out.json", "run.png", "sample.json", "<device>.json"),
)
"""Ends of file names that documents mention and that are not in the repository: files of users or
output of commands.
"""


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page to missing files or headings."""
    broken = []
    for target, anchor in LINK.findall(text):
        if ":" in target:
            continue
        file = page if not target else (page.parent / target).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@functools.cache
def anchors(file: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


@functools.cache
def existing_files() -> frozenset[str]:
    """Return the path of every file relative to the repository, and all parts of the path that start after a slash."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    names = set()
    for path in found:
        parts = path.relative_to(ROOT).parts
        names |= {"/".join(parts[i:]) for i in range(len(parts))}
    return frozenset(names)


def missing_files(text: str) -> list[str]:
    """Return the file names in inline code that are neither a path of the repository nor the end of a path."""
    named = [name for code in CODE.findall(text) for name in FILE.findall(code)]
    return [
        n
        for n in named
        if "<" not in n and not n.endswith(FOREIGN_FILES) and n.removeprefix("./") not in existing_files()
    ]


def missing_names(text: str) -> list[str]:
    """Return the names after `pallas_attn.` or `pa.` that are neither an attribute nor a module of the library."""

    def exists(name: str) -> bool:
        module = ROOT / "pallas_attn" / name
        return hasattr(pallas_attn, name) or module.with_suffix(".py").exists() or module.is_dir()

    return [name for name in NAME.findall(text) if not exists(name)]


@functools.cache
def command_lines() -> str:
    made = [f'"{flag}"' for flag in serve._LIMITS]  # from the fields of a class
    folders = ("scripts", "models/cli", "tests/aot")
    files = [ROOT / "pallas_attn/info.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    return "".join([*made, *(path.read_text() for path in files)])


def missing_flags(text: str) -> list[str]:
    """Return the flags that no command line defines. A switch --name also has the flag --no-name."""

    def is_defined(flag: str) -> bool:
        switch = re.escape(flag.replace("--no-", "--", 1))
        made = rf'add_switch\([^"]*"{switch}"|"{switch}",\s*action=argparse\.BooleanOptionalAction'
        return f'"{flag}"' in command_lines() or re.search(made, command_lines()) is not None

    return [f for f in FLAG.findall(text) if not f.startswith(FOREIGN_FLAGS) and not is_defined(f)]


def missing_targets(text: str) -> list[str]:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    code = CODE.findall(text) + re.findall(r"^(?:\$ )?(make .*)$", text, flags=re.MULTILINE)
    return [target for line in code for target in TARGET.findall(line) if target not in targets]


def test_warnings_fail_the_build_of_the_site():
    """mkdocs counts only warnings that it prints, so --strict has no effect together with --quiet."""
    (command,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in command
    assert "--quiet" not in command


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page):
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
@pytest.mark.parametrize("missing", [missing_files, missing_names, missing_flags, missing_targets])
def test_names_in_pages_exist(page, missing):
    assert missing(page.read_text()) == []


def test_missing_names_are_detected():
    page = ROOT / "docs" / "page.md"
    assert broken_links(
        page, "[a](concepts.md#pages-block-tables-and-rows) [b](nowhere.md) [c](concepts.md#nothing)"
    ) == [
        "nowhere.md",
        "concepts.md#nothing",
    ]
    assert missing_files("`pallas_attn/types.py`, `types.py`, `ops/nothing.py` and `config.json`") == ["ops/nothing.py"]
    assert missing_names("pa.paged_decode, `pallas_attn.runtime.tuning`, pallas_attn/types.py, pa.no_such_call") == [
        "no_such_call"
    ]
    assert missing_flags("--head-windows, --no-recycling, --no-head-windows, --no-such-flag") == [
        "--no-head-windows",
        "--no-such-flag",
    ]
    assert missing_targets("`make test`\nmake docs\n`make coffee`") == ["coffee"]


SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
"""A block of Python, and the block of text that may follow it, which is the output of the Python block."""


def run_examples(page: Path) -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace and return it. Compare outputs with the text blocks."""
    namespace: dict[str, Any] = {}
    for code, shown in SHOWN.findall(page.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(page), "exec"), namespace)
        assert not shown or printed.getvalue() == shown
    return namespace


@slow_cases(
    "docs/coming_from.md", "docs/concepts.md", "docs/engine.md", "docs/kv_transfer.md", "docs/weight_updates.md"
)  # fmt: skip
@pytest.mark.parametrize(
    "page", [p for p in PAGES if python_blocks(p.read_text()) and p.name != "tutorial.md"], ids=relative
)
def test_python_examples_run(page):
    assert len(run_examples(page)) > 1


def test_output_that_differs_from_the_page_is_an_error(tmp_path):
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError):
        run_examples(tmp_path / "page.md")


def test_tutorial_prints_its_output_and_decodes_the_right_tokens():
    """The blocks print the output of the page. Numpy computes the same tokens as the first block without a cache, and
    their logits are so far above the others that rounding does not change them. With MLA, prefill of all tokens gives
    the last token of the decode loop.
    """
    page = ROOT / "docs" / "tutorial.md"
    tutorial = run_examples(page)
    weights = {name: np.asarray(weight, np.float64) for name, weight in tutorial["weights"].items()}
    for prompt, output in zip(tutorial["prompts"], tutorial["outputs"], strict=True):
        for i, token in enumerate(output):
            logits = dense_logits(weights, prompt + output[:i])
            assert np.argmax(logits) == token
            assert np.sort(logits)[-1] - np.sort(logits)[-2] > 1e-3
    tokens = [prompt + output[:-1] for prompt, output in zip(tutorial["prompts"], tutorial["mla_outputs"], strict=True)]
    empty = pallas_attn.PagedLatent.allocate(tutorial["latent_spec"])
    *_, last = tutorial["generate"](tutorial["mla_step"], tutorial["mla_weights"], empty, tokens, 1)
    assert last == [output[-1:] for output in tutorial["mla_outputs"]]
    blocks = [len(code.replace("\n\n", "\n").splitlines()) for code, _ in SHOWN.findall(page.read_text())]
    assert len(blocks) == 3
    assert all(shown for _, shown in SHOWN.findall(page.read_text()))
    assert max(blocks) <= 70


def dense_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the logits of the tutorial's GQA model after a sequence of tokens."""
    x = weights["embedding"][tokens]
    x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    q, k, v = (np.einsum("tw,wnd->ntd", x, weights[name]) for name in ("q", "k", "v"))
    half = q.shape[-1] // 2
    angles = np.arange(len(tokens))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)

    def rotate(a: np.ndarray) -> np.ndarray:
        turned = (a[..., :half] + 1j * a[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    group = len(q) // len(k)
    k, v = np.repeat(rotate(k), group, axis=0), np.repeat(v, group, axis=0)
    scores = np.einsum("nd,nsd->ns", rotate(q)[:, -1], k) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("ns,nsd->nd", p / p.sum(axis=-1, keepdims=True), v)
    return (x[-1] + np.einsum("nd,ndw->w", out, weights["out"])) @ weights["head"]


def test_tables_match_the_results():
    documents = [name for name, contents in performance.documents().items() if (ROOT / name).read_text() != contents]
    assert documents == [], "run python -m scripts.tools.performance"


def test_charts_match_the_results():
    pinned = re.search(r"^matplotlib==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned
    if metadata.version("matplotlib") != pinned[1]:
        pytest.skip(f"the committed charts were drawn by matplotlib {pinned[1]}")
    charts = [name for name, contents in performance.charts().items() if (ROOT / name).read_text() != contents]
    assert charts == [], "run python -m scripts.tools.performance"


def test_unknown_table_is_an_error():
    with pytest.raises(ValueError, match=r"page\.md has the unknown table 'nothing'; known tables: paged_decode, "):
        performance.with_tables("page.md", "<!-- table nothing -->\n<!-- end -->\n")


def test_every_table_is_in_a_document():
    shown = {
        name for page in performance.DOCUMENTS for _, name, _ in performance.MARKED.findall((ROOT / page).read_text())
    }
    assert shown == set(performance.TABLES)


@pytest.mark.parametrize("result", RESULTS, ids=relative)
def test_results_have_device_versions_commit_and_date(result):
    report = json.loads(result.read_text())
    assert report["device"]
    assert "jax" in report["versions"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", report["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])


def test_every_result_file_is_linked_from_a_page() -> None:
    """If this test fails, link the result file from a page, or remove a file that no page uses. The git history keeps
    it.
    """
    pages = "".join(page.read_text() for page in PAGES)
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert [relative(path) for path in files if f"/{path.name})" not in pages] == []


def listed_names(page: str) -> list[str]:
    """Return the full names on an API page, without the types that only occur in signatures."""
    text = (ROOT / "docs" / page).read_text().partition("## Types in signatures")[0]
    return re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)


def exported_names(module: str) -> list[str]:
    source = (ROOT / module / "__init__.py").read_text()
    return re.findall(r"^from .* import \w+ as (\w+)", source, flags=re.MULTILINE)  # not the lazy names of the engine


def test_api_page_lists_all_public_names():
    exported = exported_names("pallas_attn")
    exported.remove("parallel")
    source = (ROOT / "pallas_attn" / "parallel.py").read_text()
    exported += re.findall(r"^(?:def|class) ([A-Za-z]\w*)", source, flags=re.MULTILINE)
    exported += set(cache.__all__) - {"Prefix"}  # among the types in signatures
    exported += ["paged_attention", "mqa", "gqa"]  # of compat.jax_gpu
    exported += [f"{name}_reference" for name in ("paged_attention", "mqa", "gqa", "mha")]
    assert sorted(name.split(".")[-1] for name in listed_names("api.md")) == sorted(exported)


def test_engine_api_page_lists_all_names_of_the_engine():
    names = [name for name in listed_names("engine_api.md") if name.startswith("pallas_attn.models.engine.")]
    assert sorted(name.split(".")[-1] for name in names) == sorted(exported_names("models/engine"))


def test_implementation_table_of_the_readme_matches_dispatch():
    readme = (ROOT / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in readme.splitlines() if re.match(r"\| `.*\| \*\*xla\*\* \|$", line)]
    shown = {op: cells for ops, *cells in rows for op in CODE.findall(ops)}
    assert set(dispatch.MODULES) <= set(shown)
    for op, modules in dispatch.MODULES.items():
        for cell, architecture in zip(shown[op], [(9, 0), (10, 0), (8, 0)], strict=False):
            available = [name for name in ("mosaic", "triton") if {(name, architecture), (name, None)} & set(modules)]
            assert cell.replace("*", "").strip().split(", ") == (available or ["xla"]), (op, architecture)


# --- reading orders of the kernel pages


COMMON_FILES = (
    "runtime/dispatch.py",
    "runtime/kernel_cache.py",
    "portable/arguments.py",
    "mosaic/primitives/basics.py",
)
"""Library files that every call uses. The lists of files in the documentation of kernels leave them out."""
TILE_INSTRUCTIONS = ("copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma", "tcgen05_mma", "async_load_tmem")


def traced_calls() -> dict[str, Callable[[], Any]]:
    """Return functions that run a call with a Mosaic kernel, by name."""
    ints = functools.partial(jnp.array, dtype=jnp.int32)
    tables, lens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8), ints([400, 30])
    kv_spec = pallas_attn.kv_cache_spec(num_pages=16, page_size=64, num_kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
    kv = pallas_attn.PagedKV.allocate(kv_spec)
    sizes = {"num_pages": 16, "page_size": 64, "latent_dim": 512, "rope_dim": 64}
    latents = pallas_attn.PagedLatent.allocate(pallas_attn.latent_cache_spec(**sizes, dtype=jnp.bfloat16))
    q = jnp.ones((2, 1, 8, 128), jnp.bfloat16)

    def mla_decode(heads: int) -> Callable[[], Any]:
        latent, rope = (jnp.ones((2, 1, heads, width), jnp.bfloat16) for width in (512, 64))
        return lambda: pallas_attn.mla_decode(latent, rope, latents, tables, lens, sm_scale=0.1)

    return {
        "paged_decode": lambda: pallas_attn.paged_decode(q, kv, tables, lens),
        "mla_decode, many rows": mla_decode(128),
        "mla_decode, few rows": mla_decode(16),
        "paged_prefill": lambda: pallas_attn.paged_prefill(q[:, 0], kv, tables, ints([0, 1, 2]), lens),
    }


def files_of_the_main_loop(call: Callable[[], Any]) -> set[str]:
    """Trace a call. Return the library files that are on the call stack while an instruction that copies or multiplies
    a tile is traced.

    The result has neither `COMMON_FILES` nor files of the kernel of `plan_decode`.
    """
    root, found = f"{ROOT / 'pallas_attn'}/", set()

    def recording(instruction: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            stack = {f.filename.removeprefix(root) for f in traceback.extract_stack() if f.filename.startswith(root)}
            found.update(() if any(file.startswith("ops/plan_decode/mosaic") for file in stack) else stack)
            return instruction(*args, **kwargs)

        return issue

    recorded = {name: recording(getattr(plgpu, name)) for name in TILE_INSTRUCTIONS}
    with plgpu.force_gpu_interpret_mode(), contextlib.ExitStack() as stack:
        for name, instruction in recorded.items():
            stack.enter_context(mock.patch.object(plgpu, name, instruction))
        jax.make_jaxpr(call)()
    return found - set(COMMON_FILES)


def reading_orders(page: str) -> str:
    """Return the text of all sections "Reading order" of a page. They list the files of a kernel for readers of its
    code.
    """
    text = (ROOT / "docs" / "kernels" / page).read_text()
    return "".join(re.findall(r"^#+ Reading order\n(.*?)(?=^#)", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("name", "architecture", "page"),
    [
        ("paged_decode", "9.0", "paged_decode.md"),
        ("mla_decode, many rows", "9.0", "latent_decode.md"),
        ("mla_decode, few rows", "9.0", "latent_decode.md"),
        ("paged_prefill", "9.0", "prefill.md"),
        *((name, "10.0", "blackwell.md") for name in ("paged_decode", "mla_decode, many rows", "paged_prefill")),
    ],
)
def test_reading_order_lists_every_file_of_the_main_loop(
    name: str, architecture: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, architecture)
    files, named = files_of_the_main_loop(traced_calls()[name]), CODE.findall(reading_orders(page))
    assert 4 <= len(files) <= 8
    assert [file for file in sorted(files) if not any(f"/pallas_attn/{file}".endswith(f"/{n}") for n in named)] == []
