"""Rules for imports, and banned constructs. The tests check the syntax tree of every Python file."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pallas_attn", "models", "scripts", "tests")
"""Folders with Python files. `models` is imported as `pallas_attn.models`: `pallas_attn/models` is a link to it."""
MODELS = "pallas_attn.models"
OURS = re.compile(r"(pallas_attn|models|scripts|tests)(\.|$)")
IMPLEMENTATION = re.compile(r"pallas_attn\.ops\.(\w+)\.(?!config\b|call\b|composition\b)(\w+)$")
"""Names of modules that implement an operation: all modules in its folder, except configuration, call object (the
checked arguments of a call) and composition of other operations.
"""


# --- reading imports


@dataclass(frozen=True)
class Import:
    """One imported name: `import module` (`name` is None) or `from module import name`."""

    line: int
    module: str
    name: str | None

    def reaches(self, *modules: str) -> bool:
        """Return whether the imported name equals an entry of `modules`, or starts with an entry and a dot."""
        return any(self.target == m or self.target.startswith(f"{m}.") for m in modules)

    @property
    def target(self) -> str:
        """Return the dotted name of the import: `module`, or `module.name`, which may be a module too."""
        return self.module if self.name is None else f"{self.module}.{self.name}"


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node, including statements of functions and classes. Expressions, which are most of
    the nodes of a tree, contain no statements.
    """
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(block, field, ())
        for statement in inner if isinstance(inner, list) else ():  # the body of a lambda is an expression
            yield statement
            yield from statements(statement)


def read_imports(tree: ast.Module) -> Iterator[Import]:
    """Yield all imports of a file, including imports inside functions."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (Import(node.lineno, module, alias.name) for alias in node.names)


@cache
def public_names(package: str) -> frozenset[str]:
    """Return the names that the `__init__` of a package re-exports: `from x import y as y`, and `__all__`."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names |= set(ast.literal_eval(node.value))
    return frozenset(names)


# --- rules: each yields (line, message) for every violation

type Found = Iterator[tuple[int, str]]


def is_library(module: str) -> bool:
    """Return whether a module belongs to `pallas_attn` without `pallas_attn.models`."""
    return f"{module}.".startswith("pallas_attn.") and not f"{module}.".startswith(f"{MODELS}.")


def types_device_and_checks_are_the_lowest_layer(module: str, imports: list[Import]) -> Found:
    lowest = {"pallas_attn.types": (), "pallas_attn.runtime.device": (), "pallas_attn.checks": ("pallas_attn.types",)}
    allowed = lowest.get(module)
    for i in imports:
        if allowed is not None and OURS.match(i.module) and not i.reaches(*allowed):
            yield i.line, f"imports {i.target}; {module} may import {', '.join(allowed) or 'no module of the project'}"


def references_import_only_call_types_and_portable(module: str, imports: list[Import]) -> Found:
    if not re.fullmatch(r"pallas_attn\.ops\.\w+\.reference", module):
        return
    for i in imports:
        own_call = f"{module.removesuffix('reference')}call"
        if OURS.match(i.module) and not i.reaches("pallas_attn.types", "pallas_attn.portable", own_call):
            yield i.line, f"imports {i.target}; a reference may import its own call object, types and portable"


def implementations_are_not_imported(module: str, imports: list[Import]) -> Found:
    """No module imports an implementation, because `dispatch` loads implementations from its table.

    Exception: files of one implementation may import each other.
    """
    if module.startswith("tests."):
        return
    for i in imports:
        for target in {i.module, i.target}:
            match = IMPLEMENTATION.fullmatch(target)
            if not match or not is_module(target) or are_same_implementation(module, target):
                continue
            yield i.line, f"imports {target}, an implementation; call the operation"


def are_same_implementation(module: str, other: str) -> bool:
    """Return whether two modules belong to one implementation of an operation, such as mosaic_sm90.py and
    mosaic_rows.py.
    """
    (folder, name), (other_folder, other_name) = module.rsplit(".", 1), other.rsplit(".", 1)
    return folder == other_folder and name.split("_")[0] == other_name.split("_")[0]


def is_module(target: str) -> bool:
    """Return whether a dotted name is a module or package, and not a function or class that a package defines."""
    path = ROOT / target.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def calls_import_only_types_and_checks(module: str, imports: list[Import]) -> Found:
    """A module `call` defines the call object of an operation, which validates arguments. It may import only modules
    that import no operation.
    """
    if not re.fullmatch(r"pallas_attn\.ops\.\w+\.call", module):
        return
    allowed = "types", "checks", "ops.call_base", "portable.schedule", "portable.quantise"
    for i in imports:
        if OURS.match(i.module) and not i.reaches(*(f"pallas_attn.{name}" for name in allowed)):
            yield i.line, f"imports {i.target}; a call object may import {', '.join(allowed)}"


def configurations_are_used_by_their_operation_only(module: str, imports: list[Import]) -> Found:
    for i in imports:
        match = re.match(r"pallas_attn\.ops\.(\w+)\.(?:config|composition)\b", i.target)
        if match and not f"{module}.".startswith((f"pallas_attn.ops.{match[1]}.", "tests.")):
            yield i.line, f"imports {i.target}, which belongs to another operation"


KERNEL_PACKAGES = tuple(f"pallas_attn.{name}." for name in ("ops", "portable", "mosaic", "triton"))


def operations_and_cache_are_independent(module: str, imports: list[Import]) -> Found:
    for i in imports:
        if f"{module}.".startswith(KERNEL_PACKAGES) and i.reaches("pallas_attn.cache"):
            yield i.line, f"imports {i.target}; operations take block tables and lengths, not cache objects"
        if module.startswith("pallas_attn.cache") and OURS.match(i.module) and not i.reaches("pallas_attn.cache"):
            yield i.line, f"imports {i.target}, which imports jax; pallas_attn.cache must not"


def cache_and_scheduler_do_not_import_jax(module: str, imports: list[Import]) -> Found:
    for i in imports:
        if module.startswith(("pallas_attn.cache", "pallas_attn.models.engine.scheduler")) and i.reaches(
            "jax", "jaxlib", "flax"
        ):
            yield i.line, f"imports {i.target}; the cache and the scheduler are plain Python"


BENCHMARK_IMPORTS = ("pallas_attn.runtime.tuning", "pallas_attn.jax_patches.faster_lowering.faster_lowering")


def models_and_scripts_use_public_names(module: str, imports: list[Import]) -> Found:
    """`models` and `scripts` import only public names of the library, besides `pallas_attn.models`.

    Exceptions: benchmarks may import `runtime.tuning` to read and replace the configurations of a call, and
    `jax_patches.faster_lowering` to lower kernels as the kernel cache does. The draw kernel of the sampler is written
    in Triton.
    """
    if not module.startswith((MODELS, "scripts")):
        return
    for i in imports:
        if not i.reaches("pallas_attn") or i.reaches(MODELS):
            continue
        benchmark = module.startswith("scripts.bench")
        if benchmark and i.target in BENCHMARK_IMPORTS:
            continue
        if module == f"{MODELS}.engine.draw_kernel" and i.reaches("pallas_attn.triton"):
            continue
        if i.module not in ("pallas_attn", "pallas_attn.cache", "pallas_attn.compat.jax_gpu"):
            yield i.line, f"imports {i.module}; only pallas_attn, pallas_attn.cache and pallas_attn.compat are public"
        elif i.name is not None and i.name not in public_names(i.module) | {"cache"}:
            yield i.line, f"imports {i.target}, which is not public"


LANGUAGES = ("jax.experimental.pallas", "jax.experimental.mosaic", "jaxlib.mlir", "jax_triton", "triton")


def kernel_packages_are_independent(module: str, imports: list[Import]) -> Found:
    """`portable` imports no kernel language. Shared kernel code imports no operation. Hopper and Blackwell code import
    nothing from each other, and code for both architectures imports nothing from either.
    """
    forbidden = {
        "pallas_attn.portable": (*LANGUAGES, "pallas_attn.mosaic", "pallas_attn.triton", "pallas_attn.ops"),
        "pallas_attn.mosaic": ("pallas_attn.triton", "pallas_attn.ops"),
        "pallas_attn.triton": ("pallas_attn.mosaic", "pallas_attn.ops"),
        "pallas_attn.mosaic.hopper": ("pallas_attn.mosaic.blackwell",),
        "pallas_attn.mosaic.blackwell": ("pallas_attn.mosaic.hopper",),
    }
    architectures = ("pallas_attn.mosaic.hopper", "pallas_attn.mosaic.blackwell")
    shared = module.startswith("pallas_attn.mosaic") and not module.startswith(architectures)
    for i in imports:
        for package, others in forbidden.items():
            if f"{module}.".startswith(f"{package}.") and i.reaches(*others):
                yield i.line, f"imports {i.target}; {package} must not import {', '.join(others)}"
        if shared and i.reaches(*architectures):
            yield i.line, f"imports {i.target}, code for one architecture, into code for both"


MODEL_PACKAGES = {
    "pallas_attn.models.config": (),
    "pallas_attn.models.moe": (
        "pallas_attn.models.config",
        "pallas_attn.models.decoder.layers",
        "pallas_attn.models.decoder.mesh",
    ),
    "pallas_attn.models.decoder": ("pallas_attn.models.config", "pallas_attn.models.moe"),
    "pallas_attn.models.checkpoints": ("pallas_attn.models.config", "pallas_attn.models.decoder"),
    "pallas_attn.models.engine": ("pallas_attn.models.config", "pallas_attn.models.decoder"),
    "pallas_attn.models.llm": (
        "pallas_attn.models.config",
        "pallas_attn.models.decoder",
        "pallas_attn.models.checkpoints",
        "pallas_attn.models.engine",
        "pallas_attn.models.compilation_cache",
    ),
    "pallas_attn.models.compilation_cache": (),
    "pallas_attn.models.server": (
        "pallas_attn.models.checkpoints",
        "pallas_attn.models.engine",
        "pallas_attn.models.llm",
    ),
}
"""For each package of `models`: the other packages of `models` that it may import."""


def model_packages_import_lower_packages(module: str, imports: list[Import]) -> Found:
    package = ".".join(module.split(".")[:3])
    if package not in MODEL_PACKAGES:
        return
    for i in imports:
        if i.reaches(MODELS) and not i.reaches(package, *MODEL_PACKAGES[package]):
            allowed = ", ".join(MODEL_PACKAGES[package]) or "no package of models"
            yield i.line, f"imports {i.target}; {package} may import {allowed}"


def library_does_not_import_models(module: str, imports: list[Import]) -> Found:
    """Only `pallas_attn` itself names classes of the engine, for type checkers. `test_install` tests that importing it
    imports no package of the engine.
    """
    for i in imports:
        if i.reaches("models"):
            yield i.line, f"imports {i.target}; its name is pallas_attn.{i.target}"
        if is_library(module) and module != "pallas_attn" and i.reaches(MODELS, "flax"):
            yield i.line, f"imports {i.target}; the library must not depend on models or flax"


def nothing_imports_scripts_or_tests(module: str, imports: list[Import]) -> Found:
    """Only scripts and tests import scripts, and only tests import tests."""
    for i in imports:
        if i.reaches("scripts") and not module.startswith(("scripts", "tests")):
            yield i.line, f"imports {i.target}; only scripts and tests import scripts"
        if i.reaches("tests") and not module.startswith("tests"):
            yield i.line, f"imports {i.target}; only tests import tests"


def only_scripts_import_torch(module: str, imports: list[Import]) -> Found:
    for i in imports:
        if i.reaches("torch", "transformers") and not module.startswith("scripts."):
            yield i.line, f"imports {i.target}; only scripts may import torch and transformers"


IMPORT_RULES = (
    types_device_and_checks_are_the_lowest_layer,
    references_import_only_call_types_and_portable,
    implementations_are_not_imported,
    calls_import_only_types_and_checks,
    configurations_are_used_by_their_operation_only,
    operations_and_cache_are_independent,
    cache_and_scheduler_do_not_import_jax,
    kernel_packages_are_independent,
    models_and_scripts_use_public_names,
    model_packages_import_lower_packages,
    library_does_not_import_models,
    nothing_imports_scripts_or_tests,
    only_scripts_import_torch,
)
BANNED = {
    "custom_vjp": "the library is for inference only",
    "custom_jvp": "the library is for inference only",
    "pallas_call": "on a GPU it uses the Triton lowering of jax, which is deprecated",
}

ALLOWED = ("pallas_attn.portable.arguments", "custom_jvp")
"""The only module that may use a banned name: it uses `custom_jvp` to raise an error if a caller asks for gradients."""


def banned_constructs(module: str, tree: ast.Module) -> Found:
    """Yield violations: banned names, private attributes of the library, relative imports, and `assert` in code that is
    not a test.
    """
    public = public_names("pallas_attn") | {"cache", "models", "__version__"}
    is_test, is_user = module.startswith("tests."), module.startswith((MODELS, "scripts"))
    for node in statements(tree) if is_test else ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if not is_test:
                word = name.rpartition(".")[2]
                if word in BANNED and (module, word) != ALLOWED:
                    yield node.lineno, f"uses {word}: {BANNED[word]}"
            case ast.Assert() if module.startswith(("pallas_attn", "scripts")):
                yield node.lineno, "uses assert; raise a typed exception"
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, "uses a relative import; use an absolute one"
        match node:
            case ast.Attribute(value=ast.Name(id="pallas_attn"), attr=name) if is_user and name not in public:
                yield node.lineno, f"uses pallas_attn.{name}, which is not public"


def violations(module: str, source: str | ast.Module) -> list[str]:
    """Return the violations of all rules by a module with this source or syntax tree."""
    tree = ast.parse(source) if isinstance(source, str) else source
    imports = list(read_imports(tree))
    found = [*banned_constructs(module, tree), *(error for rule in IMPORT_RULES for error in rule(module, imports))]
    return [f"{module}:{line} {message}" for line, message in sorted(set(found))]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("pallas_attn", *parts) if parts[0] == "models" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def check_folder(folder: str) -> tuple[list[str], dict[str, list[str]]]:
    """Parse all files of a folder once. Return the violations, and the names of the classes of each module."""
    wrong, classes = [], {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        module, tree = module_name(file), ast.parse(file.read_text())
        wrong += violations(module, tree)
        classes[module] = class_names(tree)
    return wrong, classes


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_follows_the_rules(folder: str) -> None:
    wrong, classes = check_folder(folder)
    assert classes
    assert not wrong


# --- folders of operations


def misnamed_operations(folders: set[str], public: frozenset[str], defined: dict[str, set[str]]) -> list[str]:
    """Return the folders of `ops` whose name is not public, or is not a function of the folder's `__init__`."""
    return sorted(name for name in folders if name not in public or name not in defined[name])


def test_operation_folders_are_named_after_their_function() -> None:
    ops = ROOT / "pallas_attn" / "ops"
    folders = {path.parent.name for path in ops.glob("*/__init__.py")}
    trees = {name: ast.parse((ops / name / "__init__.py").read_text()) for name in folders}
    defined = {
        name: {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} for name, tree in trees.items()
    }
    assert "paged_decode" in folders
    assert misnamed_operations(folders, public_names("pallas_attn"), defined) == []


def test_misnamed_folders_are_detected() -> None:
    defined = {"paged_decode": {"paged_decode"}, "common": set(), "write_kv": {"kv_write"}}
    assert misnamed_operations(set(defined), frozenset({"paged_decode", "write_kv"}), defined) == ["common", "write_kv"]


# --- names of classes

UNIQUE_IN = ("pallas_attn", "scripts")
"""Packages whose class names must be unique."""


def class_names(tree: ast.Module) -> list[str]:
    return [node.name for node in statements(tree) if isinstance(node, ast.ClassDef)]


def repeated_classes(classes: dict[str, list[str]], packages: tuple[str, ...] = UNIQUE_IN) -> list[str]:
    """Return each class name that several modules define, with the modules. At least one of them is in `packages`."""
    modules: dict[str, list[str]] = {}
    for module, names in classes.items():
        for name in names:
            modules.setdefault(name, []).append(module)
    inside = tuple(f"{package}." for package in packages)
    return [
        f"{name} in {', '.join(found)}"
        for name, found in sorted(modules.items())
        if len(found) > 1 and any(f"{module}.".startswith(inside) for module in found)
    ]


def test_class_names_are_unique() -> None:
    folders = [check_folder(folder)[1] for folder in FOLDERS if folder != "tests"]
    assert repeated_classes({module: names for classes in folders for module, names in classes.items()}) == []


def test_repeated_class_names_are_detected() -> None:
    classes = {"scripts.a": ["A", "B"], "scripts.b": ["A"], "other": ["B"]}
    assert repeated_classes(classes) == ["A in scripts.a, scripts.b", "B in scripts.a, other"]
    assert repeated_classes(classes, ("other",)) == ["B in scripts.a, other"]
    assert repeated_classes({"scripts.a": class_names(ast.parse("class A:\n    class A: pass"))}) == [
        "A in scripts.a, scripts.a"
    ]
    assert repeated_classes({"scripts.a": ["A"], "other": ["A"]}, ("third",)) == []


# --- tests of the rules

XLA = "pallas_attn.ops.paged_decode.xla"
REFERENCE = "pallas_attn.ops.paged_decode.reference"
OP = "pallas_attn.ops.paged_decode"

BAD = [
    ("pallas_attn.types", "from pallas_attn import dispatch"),
    ("pallas_attn.runtime.device", "from pallas_attn.runtime import tuning"),
    ("pallas_attn.types", "import pallas_attn.checks"),
    ("pallas_attn.checks", "from pallas_attn.portable import merge"),
    ("pallas_attn.checks", "from pallas_attn.runtime import tuning"),
    (REFERENCE, "from pallas_attn import checks"),
    (REFERENCE, "from pallas_attn.ops.paged_decode import config"),
    (REFERENCE, "from pallas_attn.ops.paged_prefill import paged_prefill"),
    (REFERENCE, "from . import xla"),
    ("pallas_attn.models.decoder.mla", "from .rope import rotate"),
    (XLA, "from pallas_attn.ops.paged_decode import reference"),
    (XLA, "from pallas_attn.ops.paged_decode.reference import paged_decode"),
    (XLA, "def f():\n    from pallas_attn.ops.paged_prefill import xla"),
    (XLA, "from ..paged_prefill.xla import paged_prefill"),
    (XLA, "import pallas_attn.ops.mla_decode.xla as other"),
    (XLA, "from pallas_attn.ops.mla_decode import config"),
    (XLA, "from pallas_attn.ops.mla_decode.config import xla_config"),
    (OP, "from pallas_attn.ops.paged_decode import xla"),
    (OP, "from pallas_attn.ops.paged_decode.xla import paged_decode"),
    (OP, "if True:\n    import pallas_attn.ops.paged_decode.xla"),
    (OP, "def f():\n    from pallas_attn.ops.paged_decode import xla"),
    (REFERENCE, "from pallas_attn.ops.mla_decode.call import MlaDecodeCall"),
    (f"{OP}.call", "from pallas_attn import dispatch"),
    (f"{OP}.call", "from pallas_attn.ops.mla_decode.call import MlaDecodeCall"),
    ("pallas_attn.ops.mla_prefill", "from pallas_attn.ops.ragged_attention import xla"),
    ("pallas_attn.ops.mla_prefill", "def f():\n    from pallas_attn.ops.ragged_attention import xla"),
    ("pallas_attn.explain", "from pallas_attn.ops.ragged_attention.reference import ragged_attention"),
    ("pallas_attn.portable.merge", "from pallas_attn.cache import PagePool"),
    ("pallas_attn.portable.merge", "import pallas_attn.cache.page_pool"),
    ("pallas_attn.portable.merge", "from pallas_attn.ops.paged_decode import paged_decode"),
    ("pallas_attn.portable.merge", "from jax.experimental import pallas as pl"),
    ("pallas_attn.portable.merge", "from pallas_attn.mosaic import basics"),
    ("pallas_attn.mosaic.primitives.basics", "from pallas_attn.mosaic.hopper import tiles"),
    ("pallas_attn.mosaic.hopper.wgmma", "from pallas_attn.ops.paged_decode import config"),
    ("pallas_attn.mosaic.hopper.wgmma", "from pallas_attn.triton import call"),
    ("pallas_attn.triton.launch", "from pallas_attn.mosaic import basics"),
    ("pallas_attn.triton.softmax", "from pallas_attn.ops.paged_decode import config"),
    ("pallas_attn.portable.merge", "import triton.language as tl"),
    ("pallas_attn.mosaic.blackwell.decode", "from pallas_attn.mosaic.hopper.tiles import operand"),
    ("pallas_attn.cache.page_pool", "import jax"),
    ("pallas_attn.cache.page_pool", "from jax import numpy as jnp"),
    ("pallas_attn.cache.page_pool", "from pallas_attn import PAGE_NONE"),
    ("pallas_attn.cache.page_pool", "def f():\n    import jax.numpy"),
    ("pallas_attn.models.engine.scheduler", "import jax.numpy as jnp"),
    ("pallas_attn.models.engine.scheduler", "from flax import nnx"),
    ("pallas_attn.models.decoder.mla", "from pallas_attn.types import PagedLatent"),
    ("pallas_attn.models.decoder.mla", "from pallas_attn.ops.mla_decode import mla_decode"),
    ("pallas_attn.models.decoder.mla", "from pallas_attn import dispatch"),
    ("pallas_attn.models.decoder.mla", "from pallas_attn.cache.page_pool import PagePool"),
    ("pallas_attn.models.decoder.mla", "from pallas_attn.cache import digest"),
    ("pallas_attn.models.decoder.mla", "import pallas_attn.runtime.tuning"),
    ("pallas_attn.models.decoder.mla", "import pallas_attn\npallas_attn.dispatch.capability()"),
    ("scripts.bench_ops", "from pallas_attn.ops import paged_decode"),
    ("scripts.bench_mesh", "from pallas_attn.ops.paged_decode import config"),
    ("scripts.run_decode", "from pallas_attn.runtime import tuning"),
    ("pallas_attn.models.config.windows", "from pallas_attn.models.decoder import StepMetadata"),
    ("pallas_attn.models.config", "from pallas_attn.models.engine import Engine"),
    ("pallas_attn.models.decoder.model", "from pallas_attn.models.checkpoints import load_model"),
    ("pallas_attn.models.decoder.explain", "from pallas_attn.models.engine.config import RunnerConfig"),
    ("pallas_attn.models.decoder.model", "def f():\n    import pallas_attn.models.engine.runner"),
    ("pallas_attn.models.checkpoints.calibration", "from pallas_attn.models.engine.verify import PlainRun"),
    ("pallas_attn.models.engine.verify", "from pallas_attn.models.checkpoints import load_model"),
    ("pallas_attn.models.engine", "from pallas_attn.models import checkpoints"),
    ("pallas_attn.convert", "from pallas_attn.models.config import ModelConfig"),
    ("pallas_attn.convert", "from flax import nnx"),
    ("tests.models.test_engine", "from models.engine import Engine"),
    ("pallas_attn.models.engine", "import models.config"),
    ("pallas_attn.models.engine", "from scripts.bench_ops import main"),
    ("pallas_attn.models.engine", "from pallas_attn.models.cli.decode.command import main"),
    ("pallas_attn.explain", "import tests.cases"),
    ("pallas_attn.models.engine", "from tests import cases"),
    ("scripts.run_decode", "from tests.cases import DECODE"),
    ("scripts.bench_ops", "from tests.ops import harness"),
    ("tests.models.test_parity", "import torch"),
    ("tests.models.test_parity", "def f():\n    from transformers import AutoModel"),
    ("pallas_attn.models.checkpoints.weights", "import torch.nn as nn"),
    (XLA, "import jax\n@jax.custom_vjp\ndef f(x): return x"),
    (XLA, "from jax import custom_jvp"),
    ("pallas_attn.portable.arguments", "from jax import custom_vjp"),
    ("pallas_attn.portable.merge", "from jax import custom_jvp"),
    ("pallas_attn.models.moe.layer", "from jax import custom_vjp as rule"),
    (XLA, "from jax.experimental import pallas as pl\npl.pallas_call(f)"),
    ("scripts.bench_mesh", "from jax.experimental.pallas import pallas_call"),
    ("pallas_attn.checks", "def f(x):\n    assert x"),
    ("pallas_attn.models.engine", "assert True"),
]
GOOD = [
    ("pallas_attn.types", "import jax\nfrom collections.abc import Sequence"),
    ("pallas_attn.checks", "from pallas_attn.types import QMAX"),
    (REFERENCE, "from pallas_attn.portable import oracle\nfrom pallas_attn.types import PagedKV"),
    (REFERENCE, "from pallas_attn.ops.paged_decode.call import PagedDecodeCall"),
    (f"{OP}.call", "from pallas_attn import checks\nfrom pallas_attn.types import PagedKV"),
    (f"{OP}.call", "from pallas_attn.portable.quantise import divide"),
    (XLA, "from pallas_attn.ops.paged_decode import config\nfrom pallas_attn.runtime import tuning"),
    (XLA, "from pallas_attn.ops.paged_decode.config import xla_config"),
    ("pallas_attn.mosaic.hopper.decode_products", "from pallas_attn.mosaic import basics"),
    (OP, "from pallas_attn import dispatch\nfrom pallas_attn.ops.paged_decode.call import PagedDecodeCall"),
    ("pallas_attn.ops.plan_decode", "from pallas_attn.ops.mla_decode.call import MlaDecodeCall"),
    ("pallas_attn.ops.mla_prefill", "from pallas_attn.ops.ragged_attention import ragged_attention"),
    ("pallas_attn.explain", "import pallas_attn.ops.ragged_attention"),
    ("pallas_attn.cache.prefix_cache", "from pallas_attn.cache.errors import CacheError\nimport numpy"),
    ("pallas_attn.models.engine.scheduler", "from pallas_attn.cache import PagePool\nimport numpy as np"),
    ("pallas_attn.models.config.gqa", "from pallas_attn.models.config.rope import read_rope"),
    (
        "pallas_attn.models.decoder.mla",
        "from pallas_attn.models.config import DeepSeekConfig\nfrom pallas_attn.models.decoder.layers import Linear",
    ),
    (
        "pallas_attn.models.checkpoints.weights",
        "from pallas_attn.models.config import ModelConfig\nfrom pallas_attn.models.decoder import Decoder",
    ),
    (
        "pallas_attn.models.engine.runner",
        "from pallas_attn.models import decoder\nfrom pallas_attn.models.engine.sampler import sample",
    ),
    (
        "pallas_attn.models.decoder.mla",
        "import pallas_attn\nfrom pallas_attn import mla_decode\npallas_attn.mla_decode",
    ),
    ("pallas_attn.models.decoder.mla", "import pallas_attn.cache\nfrom pallas_attn import cache"),
    (
        "scripts.bench_ops",
        "from pallas_attn.models.cli import prompts\nfrom scripts.bench.shapes import DECODE",
    ),
    ("scripts.bench.harness.case", "from pallas_attn.runtime import tuning"),
    ("scripts.tools.make_goldens", "import torch"),
    (
        "tests.models.test_engine",
        "from pallas_attn.models.cli.decode.command import main\nfrom pallas_attn.types import QMAX\nassert main",
    ),
    ("tests.runtime.test_dispatch", "from pallas_attn.ops.paged_decode import xla"),
]


@pytest.mark.parametrize(("module", "source"), BAD)
def test_violation_is_detected(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_public_names_include_reexports_and_all() -> None:
    assert {"paged_decode", "PagedKV", "explain"} <= public_names("pallas_attn")
    assert {"PagePool", "PrefixCache"} <= public_names("pallas_attn.cache")
