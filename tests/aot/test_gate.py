"""Tests of the compile gate itself: it accepts correct kernels, reports defects, and caches reports."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import pytest

import pallas_attn
from tests.aot import environment, gate, plans, sources
from tests.aot.case import Case, shape
from tests.aot.cases import IN_EVERY_RUN, ON_BOTH_PLUGINS
from tests.aot.compile import joins, kernels_on_slices, large_copies
from tests.aot.gate import Compiler
from tests.aot.report import Kernel, Report, complaints, parse_kernels, parse_shared_memory, parse_tmem_columns
from tests.aot.samples import SAMPLES
from tests.kit.slow_cases import slow_cases


@pytest.fixture(params=environment.PLUGINS)
def compiler(request, compilers):
    return compilers(request.param)


# `make test` runs the cases with the CUDA 13 plugin. The test of reports compiles a kernel with CUDA 12.
@slow_cases("cuda13-copies-pages", "cuda12-copies-pages", "cuda12-streams-tiles")
@pytest.mark.parametrize("name", ["copies-pages", "streams-tiles"])
def test_correct_kernels_pass(compiler, name):
    assert not list(complaints(compiler.report(name), SAMPLES[name]))


@slow_cases(
    "cuda12-spills-words0", "cuda12-does-not-fit-shared-memory-words1",
    "cuda12-leaves-the-tensor-cores-idle-words2", "cuda12-copies-its-cache-words3",
    "cuda12-has-temporaries-words6", "cuda12-is-not-one-graph-words7",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spills", ["spills: 768 bytes", "has a stack frame", "Performance Loss", "Registers are spilled"]),
        ("does-not-fit-shared-memory", ["exceeds available shared memory: smem_bytes=294976"]),
        ("leaves-the-tensor-cores-idle", ["uses no tensor cores"]),
        ("copies-its-cache", ["copies a cache: copy of bf16[64,64,128]"]),
        ("is-not-in-place", ["updates 0 of 1048576 donated bytes in place"]),
        ("has-no-kernel", ["has no Mosaic GPU kernel", "uses no tensor cores"]),
        ("has-temporaries", ["has 262144 bytes of temporaries, limit 0"]),
        ("is-not-one-graph", ["is not one CUDA graph, but launches CustomCall", "CustomCall, expected 2 operations"]),
    ],
)
def test_defective_kernels_are_reported(compiler, name, words):
    found = "\n".join(complaints(compiler.report(name), SAMPLES[name]))
    assert not [each for each in words if each not in found], found


def test_report_has_instructions_registers_and_shared_memory(compiler):
    report = compiler.report("streams-tiles")
    (kernel,) = report.kernels
    assert kernel.tensor_cores == ("HGMMA.64x128x16.F32.BF16",)
    assert 64 < kernel.registers < 256
    tiles, sums, barriers = 2 * (64 * 64 * 4 + 64 * 128 * 2), 64 * 128 * 4, 2 * 8
    assert report.shared_memory == tiles + sums + barriers


@slow_cases("cuda12")
def test_samples_have_different_kernels(compiler):
    """A process compiles equal kernels once. If two samples had equal kernels, the report of the second one would have
    no kernel. The samples are compiled in reverse order to detect this in any order.
    """
    without = {"has-no-kernel", "is-not-in-place", "does-not-fit-shared-memory"}
    counts = {name: len(compiler.report(name).kernels) for name in reversed(SAMPLES) if name not in without}
    assert set(counts.values()) == {1}, counts


@slow_cases("cuda12")
def test_compile_error_does_not_affect_the_next_case(compiler):
    assert compiler.report("does-not-fit-shared-memory").error
    assert compiler.report("copies-pages").error is None


@pytest.mark.parametrize("plugin", environment.PLUGINS)
def test_tools_of_the_plugin_come_first_on_path(compilers, plugin):
    compilers(plugin)
    path = environment.variables(plugin)["PATH"]
    for tool in ("ptxas", "nvdisasm"):
        assert Path(shutil.which(tool, path=path) or "").is_relative_to(environment.packages(plugin))


# --- cached reports


def reached(name):
    files = sources.reachable(environment.ROOT / "tests" / "aot" / f"{name}.py")
    return {str(file.relative_to(environment.ROOT)) for file in files}


def test_reachable_files_of_a_case():
    decode = reached("decode")
    assert {
        "tests/aot/plans.py",
        "pallas_attn/runtime/dispatch.py",
        "pallas_attn/ops/paged_decode/mosaic_sm90.py",
    } <= decode
    assert "pallas_attn/ops/plan_decode/__init__.py" in decode
    assert not [file for file in decode if file.startswith(("models/", "pallas_attn/ops/mla_prefill/"))]
    assert {"models/engine/runner.py", "pallas_attn/ops/mla_decode/__init__.py"} <= reached("engine")


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """Make a temporary repository with a library of one operation, a module of cases, and empty modules of the gate."""
    files = {
        "pallas_attn/__init__.py": "",
        "pallas_attn/ops/write_kv/__init__.py": "",
        "pallas_attn/ops/write_kv/mosaic.py": "from pallas_attn.mosaic import rows",
        "pallas_attn/mosaic/__init__.py": "",
        "pallas_attn/mosaic/rows.py": "",
        "pallas_attn/mosaic/others.py": "",
        "tests/aot/writes.py": "import pallas_attn\npallas_attn.write_kv",
        "tests/aot/cuda13.txt": "",
        **{f"tests/aot/{name}.py": "" for name in sources.GATE},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    library = tmp_path / "pallas_attn"
    for name, value in {"ROOT": tmp_path, "LIBRARY": library, "OPS": library / "ops"}.items():
        monkeypatch.setattr(sources, name, value)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    yield tmp_path
    forget_sources()


def forget_sources():
    sources.key.cache_clear()
    sources.neighbours.cache_clear()
    sources.code_of.cache_clear()


@pytest.mark.parametrize(
    ("file", "compiled"),
    [
        ("pallas_attn/mosaic/rows.py", 2),
        ("pallas_attn/ops/write_kv/mosaic.py", 2),
        ("tests/aot/writes.py", 2),
        ("tests/aot/cuda13.txt", 2),
        ("pallas_attn/mosaic/others.py", 1),
    ],
)
def test_report_is_cached_until_a_dependency_changes(file, compiled, repository, monkeypatch):
    monkeypatch.setattr(gate, "MODULES", {"a": "writes"})
    requested = []
    kernel = Kernel("k", 32, 0, 0, 0, (), ("HGMMA",), "sass")
    monkeypatch.setattr(Compiler, "_compile", lambda self, name: requested.append(name) or Report(kernels=(kernel,)))
    for _ in range(2):
        forget_sources()
        report = Compiler("cuda13").report("a")
        assert report.kernels[0].name == "k"
    assert len(requested) == 1
    comment, change = ("\n# changed", "\nCHANGED = 1") if file.endswith(".py") else ("", "changed")
    (repository / file).write_text((repository / file).read_text() + comment)
    forget_sources()
    Compiler("cuda13").report("a")
    assert len(requested) == 1, "a comment changes no machine code"
    (repository / file).write_text((repository / file).read_text() + change)
    forget_sources()
    Compiler("cuda13").report("a")
    assert len(requested) == compiled


def test_recorded_report_is_used_until_the_code_changes(repository, monkeypatch):
    monkeypatch.setattr(gate, "MODULES", {"a": "writes"})
    compiled = []
    kernel = Kernel("k", 32, 0, 0, 0, (), ("HGMMA",), "sass")
    report = Report(kernels=(kernel,))
    monkeypatch.setattr(Compiler, "_compile", lambda self, name: compiled.append(name) or report)
    forget_sources()
    gate.record({"cuda13": {"a": report}})
    assert Compiler("cuda13").report("a").kernels == (dataclasses.replace(kernel, sass=""),)
    assert compiled == []
    changed = repository / "pallas_attn/mosaic/rows.py"
    changed.write_text(changed.read_text() + "\nCHANGED = 1")
    forget_sources()
    Compiler("cuda13").report("a")
    assert compiled == ["a"]


def test_recorded_reports_cover_the_cases_of_every_run():
    recorded = gate.recorded()
    assert set(recorded["cuda13"]) == IN_EVERY_RUN
    assert set(recorded["cuda12"]) == ON_BOTH_PLUGINS


def test_report_of_an_error_is_not_cached(repository, monkeypatch):
    monkeypatch.setattr(gate, "MODULES", {"a": "writes"})
    requested = []
    monkeypatch.setattr(Compiler, "_compile", lambda self, name: requested.append(name) or Report(error="crashed"))
    forget_sources()
    for _ in range(2):
        assert Compiler("cuda13").report("a").error == "crashed"
    assert len(requested) == 2


# --- without the plugins


def test_missing_plugin_has_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert "run `make aot-cuda12`" in str(environment.missing("cuda12"))
    environment.packages("cuda12").mkdir(parents=True)
    assert environment.missing("cuda12") is None
    monkeypatch.setattr(environment.platform, "machine", lambda: "arm64")
    assert "this is linux on arm64" in str(environment.missing("cuda12"))


def test_plugin_versions_match_jax():
    for plugin in environment.PLUGINS:
        pins = (Path(__file__).parent / f"{plugin}.txt").read_text()
        assert f"jax-{plugin}-plugin=={jax.__version__}" in pins
        assert f"jax-{plugin}-pjrt=={jax.__version__}" in pins


LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7508) setmaxnreg is ignored to maintain minimum register requirements
ptxas warning : Registers are spilled to local memory in function 'decode_mosaic_gpu_kernel', 8 bytes spill stores
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compile time = 407.159 ms

\t.target\tsm_90a
//--------------------- .text.decode_mosaic_gpu_kernel --------------------------
        /*0f20*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, R152, gdesc[UR40], R24 ;
        /*0f30*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, R156, gdesc[UR36], R24 ;
"""


def test_kernels_are_parsed_from_the_dump():
    first, second = parse_kernels(LOG + LOG.replace("decode_", "merge_").replace("QGMMA", "FADD"))
    tensor_cores = ("QGMMA.64x64x32.F32.E4M3.E4M3",)
    assert (first.name, first.registers, first.stack) == ("decode", 168, 16)
    assert (first.spill_stores, first.spill_loads, first.tensor_cores) == (8, 12, tensor_cores)
    assert [remark.split()[0] for remark in first.remarks] == ["(C7510)", "(C7508)", "Registers"]
    assert (second.name, second.tensor_cores) == ("merge", ())


def test_kernel_without_disassembly_is_an_error():
    with pytest.raises(ValueError, match="disassembly of decode_mosaic_gpu_kernel is missing"):
        parse_kernels(LOG.partition("//---")[0])


def test_shared_memory_includes_barriers():
    barriers = "Counter({Barrier(arrival_count=2, num_barriers=3, orders_tensor_core=False): 2})"
    line = f"Resources(smem_scratch_bytes=1024, barrier_counts={barriers}, scoped_gmem_semaphores={{}})\n"
    assert parse_shared_memory(line + line.replace("1024", "512")) == (1024 + 3 * 2 * 8, 512 + 3 * 2 * 8)


def test_shared_memory_has_a_limit():
    kernel = Kernel("k", 32, 0, 0, 0, (), ("HGMMA.64x8x16.F32",), "")
    case = Case(abs, {"x": shape(1)})
    assert not list(complaints(Report(kernels=(kernel,), block_bytes=(512, 227 * 1024)), case))
    (complaint,) = complaints(Report(kernels=(kernel,), block_bytes=(512, 227 * 1024 + 8)), case)
    assert "232456 bytes of shared memory" in complaint


@pytest.mark.parametrize(
    ("registers", "requests", "wanted"),
    [
        (168, ("TRY_ALLOC.CTAPOOL UP0, 0xe8", "DEALLOC.CTAPOOL 0x28", "TRY_ALLOC.CTAPOOL UP0, 0xe8"), 504),
        (168, ("TRY_ALLOC.CTAPOOL UP0, 0xf0", "DEALLOC.CTAPOOL 0x20", "TRY_ALLOC.CTAPOOL UP0, 0xf0"), 512),
        (128, ("DEALLOC.CTAPOOL 0x20", "TRY_ALLOC.CTAPOOL UP0, 0xa0"), 512),  # three warpgroups execute TRY_ALLOC
        (128, ("DEALLOC.CTAPOOL 0x28", "TRY_ALLOC.CTAPOOL UP0, 0xa0"), 520),
        (255, (), 0),
    ],
)
def test_registers_of_warpgroups_have_a_limit(registers, requests, wanted):
    sass = "".join(f"/*0500*/ USETMAXREG.{each} ;\n" for each in requests)
    kernel = Kernel("k", registers, 0, 0, 0, (), ("HGMMA",), sass)
    assert kernel.wanted_registers == wanted
    found = list(complaints(Report(kernels=(kernel,)), Case(abs, {"x": shape(1)})))
    given = 504 if registers == 168 else 512
    assert found == ([f"k requests {wanted} registers, limit {given}"] if wanted > given else [])


def test_permitted_spills_are_a_limit():
    remark = "Registers are spilled to local memory in function 'k', 4 bytes spill stores, 8 bytes spill loads"
    report = Report(kernels=(Kernel("k", 32, 8, 4, 8, (remark,), ("HGMMA",), ""),))
    case = Case(abs, {"x": shape(1)})
    assert not list(complaints(report, case, permitted_spills=12))
    assert list(complaints(report, case, permitted_spills=11)) == ["k spills: 4 bytes stored, 8 loaded"]
    assert len(list(complaints(report, case))) == 3


def test_tensor_memory_has_a_limit():
    """The limit is 512 columns per multiprocessor for all `blocks` thread blocks. A thread block allocates a power of
    two of columns.
    """
    kernel = Kernel("k", 32, 0, 0, 0, (), ("UTCHMMA",), "")
    line = "Resources(smem_scratch_bytes=1024, tmem_scratch_cols={}, barrier_counts=Counter())\n"
    assert [parse_tmem_columns(line.format(n)) for n in (0, 16, 96, 512, 520)] == [0, 32, 128, 512, 1024]
    on_b200 = Case(abs, {"x": shape(1)}, card="B200", blocks=2)
    assert not list(complaints(Report(kernels=(kernel,), tmem_columns=256), on_b200))
    (complaint,) = complaints(Report(kernels=(kernel,), tmem_columns=512), on_b200)
    assert complaint == "requires 2 thread blocks per multiprocessor, but 1 fit"
    first, *_ = complaints(Report(kernels=(kernel,), tmem_columns=1024), on_b200)
    assert first == "needs 1024 columns of tensor memory, limit 512"


@pytest.mark.parametrize("other", ["HMMA.16816.F32", "HGMMA.64x8x16.F32"])
def test_tensor_core_instructions_of_another_card_are_reported(other):
    kernel = Kernel("k", 32, 0, 0, 0, (), ("UTCHMMA", other), "")
    (complaint,) = complaints(Report(kernels=(kernel,)), Case(abs, {"x": shape(1)}, card="B200"))
    assert complaint == f"k uses tensor-core instructions of other cards: {other}"


def test_shared_memory_equals_the_size_of_the_scratch_types():
    report = Report(kernels=(Kernel("k", 32, 0, 0, 0, (), ("HGMMA.64x8x16.F32",), ""),), block_bytes=(4096, 5120))
    assert not list(complaints(report, Case(abs, {"x": shape(1)}, scratch_bytes=4096)))
    (complaint,) = complaints(report, Case(abs, {"x": shape(1)}, scratch_bytes=4104))
    assert complaint == "needs 4096 and 5120 bytes of shared memory, but the scratch types have 4104"


@pytest.mark.parametrize(
    ("registers", "shared_memory", "fit"), [(128, 1024, 4), (129, 1024, 3), (32, 57344, 4), (32, 57345, 3)]
)
def test_required_thread_blocks_fit_a_multiprocessor(registers, shared_memory, fit):
    report = Report(kernels=(Kernel("k", registers, 0, 0, 0, (), ("HGMMA",), ""),), block_bytes=(shared_memory,))
    case = Case(abs, {"x": shape(1)}, blocks=4)
    assert list(complaints(report, case)) == [
        f"requires 4 thread blocks per multiprocessor, but {fit} fit" for _ in range(4 - fit)
    ]


@pytest.mark.parametrize("mode", ["balanced", "fixed"])
def test_plan_shapes_equal_plan_decode(mode):
    made = jax.eval_shape(
        functools.partial(pallas_attn.plan_decode, num_programs=5, mode=mode, implementation="xla"),
        **plans.step(3, page_size=16, kv_heads=2),
    )
    got = plans.plan_shapes(page_size=16, kv_heads=2, num_programs=5, mode=mode, batch=3)
    assert dataclasses.replace(got, implementation="xla") == made


def test_kernels_on_slices_are_found():
    module = """HloModule jit_step
%fused_slice (p: s32[89]) -> s32[4] {
  ROOT %slice = s32[4]{0} slice(%p), slice={[4:8]}
}
%dynamic-slice-fusion.1 (p0: s32[89], p1: bf16[4,64]) -> f32[4] {
  %slice.1 = s32[64]{0} slice(%p0), slice={[12:76]}
  ROOT %kernel = f32[4]{0} custom-call(%slice.1, %p1), custom_call_target="mosaic_gpu_v2"
}
%dynamic-slice-fusion (p0: s32[89]) -> s32[4] {
  ROOT %product = s32[4]{0} custom-call(%p0), custom_call_target="__cublas$gemm"
}
ENTRY %main (packed: s32[89], q: bf16[4,64]) -> f32[4] {
  ROOT %kernel.1 = f32[4]{0} custom-call(%packed, %q), custom_call_target="mosaic_gpu_v2"
}
"""
    assert kernels_on_slices(module) == ("dynamic-slice-fusion.1",)


def test_large_copies_are_found():
    module = """
  %copy.3 = bf16[64,64,128]{2,1,0} copy(%cache.1)
  ROOT %copy-start.1 = (s8[64,64,128]{2,1,0}, s8[64,64,128]{2,1,0:S(5)}, u32[]{:S(2)}) copy-start(%cache.1)
  %small = bf16[64,128]{1,0} copy(%page)
  %kernel.1 = bf16[64,64,128]{2,1,0} custom-call(%copy.3), metadata={op_name="a copy(b)"}
"""
    assert large_copies(module, 64 * 64 * 128) == ("copy of bf16[64,64,128]", "copy-start of s8[64,64,128]")


def test_concatenations_and_copies_of_the_output_are_found():
    module = """
    %param_0.1: bf16[2112,64,64])
  %concatenate.3 = bf16[2112,64,64]{2,1,0} concatenate(%parameter_0.1, %parameter_1.1), dimensions={0}
  %concatenate.4 = bf16[2112,128]{1,0} concatenate(%parameter_0.1, %parameter_1.1), dimensions={1}
  ROOT %copy.1 = bf16[2112,64,64]{2,1,0} copy(%concatenate.3)
  %split.1 = bf16[2112,64,64]{2,1,0} slice(%bitcast.1), slice={[0:2112], [0:64], [0:64]}
"""
    assert joins(module, (2112, 64, 64)) == ("concatenate of bf16[2112,64,64]", "copy of bf16[2112,64,64]")
