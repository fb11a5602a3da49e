"""Tests of scripts/tools/tile_budget.py and sass.py, which read listings of the machine instructions (SASS) of kernels.

The tools find the main loop of a kernel, count its instructions by groups, and compute cycles per tile.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from scripts.bench.harness.session import RESULTS
from scripts.tools.sass import Instruction, loops, main_loops, parse
from scripts.tools.tile_budget import ISSUE, MEASURED, Card, main, pipe_cycles, tile_budget
from tests.aot.cases import CASES

LISTING = Path(__file__).parent / "stream_matmul.sass"
SAMPLE = LISTING.read_text()
COUNTS = {
    "tensor": 4,
    "load": 18,  # 16 loads from shared memory, and 2 TMA copies for later tiles
    "convert": 16,
    "barrier": 9,
    "uniform": 37,
    "integer": 13,
    "float": 32,
    "other": 5,
}


def listing(*lines: str) -> str:
    """Return a listing of these lines as nvdisasm prints it: instructions with addresses, and labels, which end with
    ":".
    """
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/    {line} ;" for n, line in enumerate(lines)
    )


def without_labels(text: str) -> str:
    """Return a listing as cuobjdump prints it: without labels, and with addresses as jump targets."""
    pairs = re.findall(r"(?m)^(\.L_x_\d+):\n(?:\.L_x_\d+:\n)*\s+/\*([0-9a-f]+)\*/", text)
    for label, address in pairs:
        text = text.replace(f"`({label})", f"0x{int(address, 16):x}")
    return re.sub(r"(?m)^\.L_x_\d+:\n", "", text)


# --- instructions


@pytest.mark.parametrize(
    ("group", "opcodes"),
    [
        ("tensor", "HGMMA.64x128x16.F32.BF16 QGMMA.64x64x32.F32.E4M3.E4M3 IGMMA.64x8x32.S8.S8 HMMA.16816.F32 UTCHMMA"),
        ("load", "LDS.128 LDSM.16.M88.4 LDG.E LDC.64 LDL UTMALDG.5D UBLKCP"),
        ("store", "STS.64 STSM.16.M88.4 STG.E STL UTMASTG.4D RED.E.ADD ATOMG.E.ADD"),
        ("convert", "I2F.S8 I2FP.F32.S32 F2FP.BF16.F32.PACK_AB F2F.F16.F32 F2I.S8 I2IP.S8 F2IP FRND"),
        ("exp2", "MUFU.EX2 MUFU.RCP"),
        (
            "barrier",
            "BAR.SYNC SYNCS.PHASECHK DEPBAR.LE LDGDEPBAR WARPGROUP.ARRIVE WARPSYNC FENCE.VIEW.ASYNC ELECT VOTEU",
        ),
        ("uniform", "UMOV UIADD3 ULDC.64 R2UR S2UR USETMAXREG"),
        (
            "integer",
            "IMAD.MOV.U32 IADD3 LOP3.LUT PLOP3.LUT PRMT SHF.R.U32.HI SHFL.BFLY LEA SEL MOV ISETP VIADD FLO CS2R",
        ),
        ("float", "FFMA FMUL FADD FMNMX FSEL FSETP HFMA2.BF16_V2 HADD2.F32 HMUL2"),
        ("other", "BRA EXIT NOP CALL.REL.NOINC"),
    ],
)
def test_opcodes_have_instruction_groups(group, opcodes):
    for opcode in opcodes.split():
        assert Instruction(0, "", opcode, "").group == group, opcode


@pytest.mark.parametrize(
    ("opcode", "cycles"),
    [
        ("HGMMA.64x128x16.F32.BF16", {ISSUE: 1, "tensor": 64}),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", {ISSUE: 1, "tensor": 64}),
        ("HGMMA.64x128x8.F32.TF32", {ISSUE: 1, "tensor": 64}),
        ("FFMA", {ISSUE: 1, "fma": 1}),
        ("HFMA2.BF16_V2", {ISSUE: 1, "fma": 1}),
        ("IMAD.MOV.U32", {ISSUE: 1, "fma": 2}),
        ("FMNMX", {ISSUE: 1, "alu": 2}),
        ("PRMT", {ISSUE: 1, "alu": 2}),
        ("SHFL.BFLY", {ISSUE: 1, "shuffle": 4}),
        ("I2FP.F32.S32", {ISSUE: 1, "convert": 2}),
        ("MUFU.EX2", {ISSUE: 1, "exp2": 8}),
        ("LDS", {ISSUE: 1, "shared memory": 4}),
        ("LDS.128", {ISSUE: 1, "shared memory": 16}),
        ("STS.64", {ISSUE: 1, "shared memory": 8}),
        ("LDSM.16.M88", {ISSUE: 1, "shared memory": 4}),
        ("STSM.16.MT88.4", {ISSUE: 1, "shared memory": 16}),
        ("BRA", {ISSUE: 1}),
    ],
)
def test_opcodes_have_pipe_cycles(opcode, cycles):
    assert pipe_cycles(Instruction(0, "", opcode, "")) == cycles


# --- loops


def test_main_loop_of_a_kernel_is_found():
    """The main loop has the branch that skips a barrier wait. It has neither the inner loop that polls the barrier, nor
    the trap after the end of the kernel.
    """
    (body,) = main_loops(parse(SAMPLE))
    assert Counter(instruction.group for instruction in body) == COUNTS
    addresses = {instruction.address for instruction in body}
    assert {0x930, 0x1170, 0x19C0} <= addresses
    assert not addresses & {0x920, 0x1950, 0x1970, 0x19B0, 0x19D0}


def test_addresses_instead_of_labels():
    assert main_loops(parse(without_labels(SAMPLE))) == [
        [Instruction(i.address, i.predicate, i.opcode, without_label(i.operands)) for i in body]
        for body in main_loops(parse(SAMPLE))
    ]


def without_label(operands: str) -> str:
    jumps = {".L_x_4": "0x1970", ".L_x_5": "0x1130", ".L_x_6": "0x930", ".L_x_7": "0x9b0"}
    return re.sub(r"`\((\.L_x_\d)\)", lambda found: jumps[found[1]], operands)


def test_innermost_loops_are_found():
    text = listing(
        ".L_x_0:", "UMOV", ".L_x_1:", "FADD", "@P0 BRA `(.L_x_1)", ".L_x_2:", "HGMMA.64x8x16.F32", ".L_x_3:", "FMUL",
        "BRA P1, `(.L_x_3)", "@P2 BRA `(.L_x_2)", ".L_x_4:", "QGMMA.64x8x32.F32", "@!P3 BRA `(.L_x_4)",
        "@UP0 BRA `(.L_x_0)", "HGMMA.64x8x16.F32", "EXIT",
    )  # fmt: skip
    kernel = parse(text)
    assert sorted(len(body) for body in loops(kernel)) == [2, 2, 2, 4, 10]
    assert [[i.head for i in body] for body in main_loops(kernel)] == [["HGMMA", "BRA"], ["QGMMA", "BRA"]]


def test_jump_into_the_middle_is_not_a_loop():
    text = listing("@P0 BRA `(.L_x_1)", ".L_x_0:", "HGMMA.64x8x16.F32", "EXIT", ".L_x_1:", "FADD", "BRA `(.L_x_0)")
    assert loops(parse(text)) == []


def test_jump_table_has_all_its_targets():
    text = listing(
        'BRX R2 -0x30 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', ".L_x_0:", "FADD", "EXIT", ".L_x_1:", "HGMMA.64x8x16.F32",
        "BRA `(.L_x_1)",
    )  # fmt: skip
    assert parse(text).successors[0] == {1, 3}
    assert [[i.head for i in body] for body in main_loops(parse(text))] == [["HGMMA", "BRA"]]


# --- budgets


def test_budget_counts_instructions_and_cycles():
    budget = tile_budget(SAMPLE)
    assert budget.counts == COUNTS
    assert budget.cycles == {
        ISSUE: sum(COUNTS.values()),
        "tensor": 4 * 64,
        "alu": 2 * (13 - 2 + 32),  # integer instructions without two IMAD, and 32 FSEL
        "fma": 2 * 2,  # two IMAD
        "convert": 2 * 16,
        "shared memory": 16 * 8,
    }
    assert budget.busiest == "tensor"
    assert budget.num_bytes == 16384


def test_loop_over_several_tiles_costs_the_same_per_tile():
    """Counts are per tile. If an iteration has twice the multiply-adds of a tile, it processes two tiles (unrolling).
    If it has half of them, two warpgroups share a tile.
    """
    whole = tile_budget(SAMPLE)
    half = tile_budget(SAMPLE.replace("524288", str(524288 // 2)))
    shared = tile_budget(SAMPLE.replace("524288", str(524288 * 2)))
    assert half.cycles == {pipe: cycles / 2 for pipe, cycles in whole.cycles.items()}
    assert shared.counts == {group: 2 * count for group, count in whole.counts.items()}


def test_iteration_with_unknown_shapes_is_one_tile():
    text = listing(".L_x_0:", "UTCHMMA gdesc[UR4], gdesc[UR8], tmem[UR10]", "LDTM.x16 R4, tmem[UR4]", "BRA `(.L_x_0)")
    budget = tile_budget(f"// tile: 65536 bytes, 4194304 multiply-adds\n{text}")
    assert budget.counts == {"tensor": 1, "load": 1, "other": 1}
    assert budget.cycles == {ISSUE: 3}


def test_bytes_take_time():
    assert Card().arrival_cycles(32768) == pytest.approx(32768 / (4.3e12 / 132) * 1.98e9)
    assert Card(bandwidth=132.0, multiprocessors=132, clock=3.0).arrival_cycles(5) == 15


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SAMPLE.replace("tile:", ""), "expected a line such as"),
        (SAMPLE.replace("HGMMA", "FADD"), "no loop of this kernel uses"),
        ("// tile: 1 bytes, 1 multiply-adds", "expected a listing of machine instructions"),
        ("// tile: 1 bytes, 1 multiply-adds\n" + listing("BRA `(.L_x_9)"), "its target is not in the listing"),
    ],
)
def test_bad_listings_are_errors(text, words):
    with pytest.raises(ValueError, match=words):
        tile_budget(text)


def test_the_table(capsys):
    main([str(LISTING), "--bandwidth", "2.15e12"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "stream_matmul" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    arrive = 16384 * 132 / 2.15e12 * 1.98e9
    assert cells[0] == "stream_matmul"
    assert cells[-5:] == ["134", "tensor 256", "16,384", f"{arrive:,.0f}", f"{256 / arrive:.0%}"]


def test_forecasts_and_times_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table compares the forecast time of a call with its measured time.

    The number of tiles is the larger of two numbers: from the multiply-adds and from the bytes of the call. In this
    test, multiply-adds give more tiles, and the tensor cores take longer than the copies.
    """
    sample = tmp_path / "paged-prefill-d128.sass"
    sample.write_text(SAMPLE)
    (tile,) = re.findall(r"// tile: (\d+) bytes, (\d+) multiply-adds", SAMPLE)
    num_bytes, multiply_adds = map(int, tile)
    case = {"case": MEASURED[sample.stem][1], "bytes": 500 * num_bytes, "flops": 2 * 132 * 1000 * multiply_adds}
    report = {"cases": [case | {"results": {"mosaic": {"median_us": 200.0}}}]}
    (tmp_path / "paged_prefill_nvidia_h200.json").write_text(json.dumps(report))
    main([str(sample), str(LISTING), "--clock", "2e9", "--bandwidth", "1e12", "--results", str(tmp_path)])
    printed = capsys.readouterr().out.partition("Forecasts and measured times")[2]
    (row,) = (line for line in printed.splitlines() if "│" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == [sample.stem, case["case"], "8", "tensor 128", "128", "200", "1.56"]


@pytest.mark.parametrize("name", MEASURED)
def test_measured_cases_exist(name: str) -> None:
    """Each case of the table of forecasts is in a file of benchmark results, and its kernel is
    compiled by tests/aot.
    """
    operation, case = MEASURED[name]
    report = json.loads((RESULTS / f"{operation}_nvidia_h200.json").read_text())
    assert [entry for entry in report["cases"] if entry["case"] == case and "mosaic" in entry["results"]]
    assert name in CASES
