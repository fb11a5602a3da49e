"""The installed package: contents of wheel, source distribution and editable install, extras, and packages that an
import needs. `make dist` and `make test-install` install the wheel into empty environments.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import editables
import pytest
from packaging.requirements import Requirement

import pallas_attn
from pallas_attn import models
from pallas_attn.models import server
from pallas_attn.models.engine import SamplingParams

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["optional-dependencies"].items()}
PIP = "pip install 'pallas_attn[engine]'"


def run(source: str, *argv: str | Path, flags: tuple[str, ...] = (), cwd: Path = ROOT) -> str:
    """Run Python source in a new process and return its standard output."""
    command = [sys.executable, *flags, "-c", source, *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


# --- contents of distributions


def build(kind: str, folder: Path, project: Path = ROOT) -> Path:
    """Build a "wheel", "sdist" or "editable" of a project in a folder. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    source = f"import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"
    return folder / run(source, folder, cwd=project).splitlines()[-1]


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution in a new folder and return the folder of the project."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel that is built from the checkout."""
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))).namelist()


def test_wheel_has_one_top_level_package_with_all_modules(wheel: list[str]) -> None:
    metadata = f"pallas_attn-{pallas_attn.__version__}.dist-info"
    assert {name.partition("/")[0] for name in wheel} == {"pallas_attn", metadata}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "pallas_attn").rglob("*.py")}
    modules |= {f"pallas_attn/{path.relative_to(ROOT)}" for path in (ROOT / "models").rglob("*.py")}
    assert "pallas_attn/models/engine/engine.py" in modules
    assert modules <= set(wheel)
    assert "pallas_attn/py.typed" in wheel
    assert any(re.fullmatch(r"pallas_attn/runtime/tuned/.*\.json", name) for name in wheel)


def test_wheel_of_the_source_distribution_has_the_same_files(wheel: list[str], tmp_path: Path) -> None:
    project = unpack(build("sdist", tmp_path), tmp_path / "unpacked")
    assert sorted(zipfile.ZipFile(build("wheel", tmp_path, project)).namelist()) == sorted(wheel)


FIND = """
import importlib.machinery, importlib.util, site, sys
site.addsitedir(sys.argv[1])
package = importlib.util.find_spec("pallas_attn")
models = importlib.machinery.PathFinder.find_spec("models", package.submodule_search_locations)
print(package.origin, models.origin)
print([name for name in sys.argv[2:] if importlib.util.find_spec(name) is not None])
"""


def test_editable_install_has_one_top_level_package(tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(build("editable", tmp_path)) as archive:
        archive.extractall(site)
    shutil.copytree(Path(editables.__file__).parent, site / "editables")
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and re.fullmatch(r"[a-z]\w*", path.name)]
    assert {"models", "scripts", "tests", "pallas_attn"} <= set(folders)
    # Without site-packages, without environment variables and without the current folder on the path.
    origins, found = run(FIND, site, *folders, flags=("-S", "-I"), cwd=tmp_path).splitlines()
    assert origins == f"{ROOT}/pallas_attn/__init__.py {ROOT}/pallas_attn/models/__init__.py"
    assert found == "['pallas_attn']"


def metadata(folder: Path, project: Path = ROOT) -> str:
    """Return the metadata of a wheel of a project. The wheel is built in a folder."""
    with zipfile.ZipFile(build("wheel", folder, project)) as archive:
        return archive.read(f"pallas_attn-{pallas_attn.__version__}.dist-info/METADATA").decode()


@pytest.mark.slow
def test_address_of_the_repository_makes_links_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REPO_URL", raising=False)
    plain = metadata(tmp_path / "plain")
    assert "Project-URL" not in plain
    assert plain.endswith((ROOT / "README.md").read_text())
    monkeypatch.setenv("REPO_URL", "https://example.org/owner/name/")
    absolute = metadata(tmp_path / "absolute")
    assert "\nProject-URL: Repository, https://example.org/owner/name\n" in absolute
    assert re.search(r"!\[[^]]*\]\(https://example.org/owner/name/raw/v[\d.]+/docs/figures/roofline.svg\)", absolute)
    links = [link for link in re.findall(r"\]\(([^)]*)\)", absolute) if not link.startswith(("https://", "#"))]
    assert links == []
    unpacked = unpack(build("sdist", tmp_path), tmp_path / "unpacked")
    monkeypatch.delenv("REPO_URL")
    assert metadata(tmp_path / "from_sdist", unpacked) == absolute


# --- extras


def test_requirements_are_pinned() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name.lower())

    with (ROOT / "constraints.txt").open() as file:
        pinned = {normal(line.partition("==")[0]) for line in file}
    required = [Requirement(line) for line in PROJECT["dependencies"]]
    required += [requirement for extra in EXTRAS.values() for requirement in extra]
    assert {normal(requirement.name) for requirement in required} - {"pallas-attn"} <= pinned


def test_extras() -> None:
    assert {"engine", "server", "cuda12", "cuda13", "triton", "plot", "all"} <= set(EXTRAS)
    assert [str(requirement) for requirement in EXTRAS["all"]] == ["pallas_attn[plot,server,triton]"]
    assert {requirement.name for requirement in EXTRAS["engine"]} == {*models.REQUIRED, "flatbuffers"}
    assert {requirement.name for requirement in EXTRAS["server"]} == {*server.REQUIRED, "pallas_attn"}
    for extra in ("cuda12", "cuda13"):
        assert f"jax[{extra}]" in map(str, EXTRAS[extra])
        assert "flatbuffers" in {requirement.name for requirement in EXTRAS[extra]}


IMPORTED = """
import sys, jax
before = set(sys.modules)
import pallas_attn
print(*(set(sys.modules) - before))
"""


def test_import_loads_jax_numpy_and_jaxtyping_only() -> None:
    loaded = run(IMPORTED).split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"pallas_attn", "jax", "numpy", "jaxtyping", "wadler_lindig"}
    assert "pallas_attn.ops.paged_decode" in loaded
    slow = ("pallas_attn.models", "pallas_attn.mosaic", "pallas_attn.triton", "jax.experimental.pallas")
    assert not [name for name in loaded if name.startswith(slow)]


WITHOUT_FLAX = """
import pydoc, sys
sys.modules["flax"] = None
sys.argv[0] = "/bin/pallas-attn"
import pallas_attn
from pallas_attn.__main__ import main

def message(source):
    try:
        exec(source)
    except ModuleNotFoundError as error:
        return f"{error.name}: {error}"

print(message("import pallas_attn.models"))
print(message("import pallas_attn.models.config"))
print(message("from pallas_attn import LLM"))
print(message("pallas_attn.SamplingParams"))
print("LLM" in dir(pallas_attn), "VERSION" in pydoc.plain(pydoc.render_doc(pallas_attn)))
sys.stderr = sys.stdout
print(main(["decode", "--help"]))
"""


def test_missing_engine_is_reported_in_one_line() -> None:
    *messages, listed, printed, status = run(WITHOUT_FLAX).splitlines()
    assert messages == [f"flax: pallas_attn.models needs flax: {PIP}"] * 4
    assert listed == "False True"
    assert printed == f"pallas-attn decode: error: pallas_attn.models needs flax: {PIP}"
    assert status == "2"


# --- names of the engine


def test_names_of_the_engine() -> None:
    assert pallas_attn.SamplingParams is SamplingParams
    assert {"LLM", "SamplingParams", "paged_decode", "__version__"} <= set(dir(pallas_attn))
    with pytest.raises(AttributeError, match="module 'pallas_attn' has no attribute 'LMM'"):
        pallas_attn.LMM  # noqa: B018


@pytest.mark.skipif(find_spec("pallas_attn.models.llm") is None, reason="has no pallas_attn.models.llm yet")
def test_llm_is_the_class_of_its_module() -> None:
    from pallas_attn.models import llm

    assert pallas_attn.LLM is llm.LLM
