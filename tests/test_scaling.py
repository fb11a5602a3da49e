"""Tests of the communication model for several GPUs: its arithmetic, and its table in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.tools import scaling

V3, LINKS = scaling.MODELS["DeepSeek-V3"], scaling.Links()


def test_data_ranks_gather_rows_and_sum_parts():
    step, sent = scaling.data_step(V3, 64, 8, LINKS), 7 * 64 * 14336
    assert step.sent_mb == pytest.approx(58 * 2 * sent / 1e6)
    assert step.ms == pytest.approx(58 * 2 * (24 + sent / 270e3) / 1e3)


def test_hosts_gather_from_each_other():
    step, rows = scaling.data_step(V3, 64, 16, LINKS), 64 * 14336
    assert step.sent_mb == pytest.approx(58 * 2 * 15 * rows / 1e6)
    assert step.ms == pytest.approx(58 * 2 * (30 + 14 * rows / 270e3 + rows / 50e3) / 1e3)


def test_many_ranks_exchange_rows_with_experts():
    step, sent = scaling.data_step(V3, 64, 64, LINKS), 64 * 8 * 14336
    assert step.sent_mb == pytest.approx(58 * 2 * sent * 63 / 64 / 1e6)
    assert step.ms == pytest.approx(58 * (3 * 30 + 2 * sent * 56 / 64 / 50e3) / 1e3)


def test_two_sums_per_layer_on_all_gpus():
    step = scaling.tensor_step(V3, 1, 16, LINKS)
    near, far = 2 * 7 / 8 * 16 * 14336, 2 * 1 / 2 * 16 * 14336 / 8
    assert step.sent_mb == pytest.approx(122 * (near + far) / 1e6)
    assert step.ms == pytest.approx(122 * (30 + near / 270e3 + far / 50e3) / 1e3)


@pytest.mark.parametrize(("gpus", "sent", "latencies"), [(16, 8 * 64 * 14336, 2), (64, 64 * 8 * 14336 * 7 / 8, 3)])
def test_sums_within_hosts_and_exchange_between_hosts(gpus: int, sent: float, latencies: int):
    step, sums = scaling.host_step(V3, 64, gpus, LINKS), scaling.tensor_step(V3, 64, 8, LINKS)
    assert step.sent_mb == pytest.approx(sums.sent_mb + 58 * 2 * sent / 1e6)
    assert step.ms == pytest.approx(sums.ms + 58 * (latencies * 30 + 2 * sent / 50e3) / 1e3)


def test_document_has_the_table(capsys):
    scaling.main([])
    page = Path(__file__).parents[1] / "docs" / "scaling.md"
    assert capsys.readouterr().out.strip() in page.read_text()
    scaling.main(["--rows", "1"])
    assert "| DeepSeek-V3 | 8 | `data=8` | 12 | 2.8 | 197.5 |" in capsys.readouterr().out
