"""Tests of scripts/tools/durations.py, which makes the table of test durations from JUnit files."""

from pathlib import Path

import pytest

from scripts.tools import durations

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.ops.test_a" name="test_one[x]" time="1.25"/>
<testcase classname="tests.ops.test_a.TestGroup" name="test_two" time="2.0"/>
<testcase classname="tests.test_b" name="test_three" time="0.5"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "test.xml").write_text(JUNIT)
    (tmp_path / "test-slow-1-of-2.xml").write_text(JUNIT.replace("1.25", "10"))
    return [tmp_path / "test.xml", tmp_path / "test-slow-1-of-2.xml"]


def test_modules_of_a_run_replace_their_entries(files: list[Path]) -> None:
    before = {"modules": {"tests/test_b.py": {"every_run": 9.0, "slow": 7.0}, "tests/test_c.py": {"slow": 4.0}}}
    found = durations.updated(before, files)["modules"]
    assert found["tests/ops/test_a.py"] == {"every_run": 3.2, "every_run_tests": 2, "slow": 12.0, "slow_tests": 2}
    assert found["tests/test_b.py"] == {"every_run": 0.5, "every_run_tests": 1, "slow": 0.5, "slow_tests": 1}
    assert found["tests/test_c.py"] == {"slow": 4.0}


def test_page_has_the_longest_module_first(files: list[Path]) -> None:
    page = durations.page(durations.updated({}, files))
    assert "In total 4 s for `make test` and 12 s for `make test-slow`." in page
    assert page.index("tests/ops/test_a.py | 2 | 3.2 | 2 | 12.0") < page.index("tests/test_b.py | 1 | 0.5 | 1 | 0.5")
