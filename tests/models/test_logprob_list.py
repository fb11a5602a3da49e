"""Log probabilities stored as numbers: the list equals a list of `TokenLogprobs`, without objects per token."""

import gc
import random

import numpy as np
import pytest

from pallas_attn.models.engine import TokenLogprobs
from pallas_attn.models.engine.logprob_list import LogprobList


def made(rng: random.Random, count: int, number: int) -> tuple[LogprobList, list[TokenLogprobs]]:
    """Make a list of random entries, and the same entries as objects."""
    words, entries = np.zeros((number, 3 + 2 * count), np.int32), []
    for row in words:
        values = [np.float32(-rng.expovariate(1)) for _ in range(1 + count)]
        ids = [rng.randrange(2**31) for _ in range(2 + count)]
        row[:] = [ids[0], values[0].view(np.int32), ids[1], *ids[2:], *(value.view(np.int32) for value in values[1:])]
        top = zip(ids[2:], map(float, values[1:]), strict=True)
        entries.append(TokenLogprobs(ids[0], float(values[0]), ids[1], tuple(top)))
    return LogprobList(count, words), entries


@pytest.mark.parametrize("count", [0, 1, 5])
def test_list_equals_a_list_of_objects(count):
    rng = random.Random(count)
    found, expected = made(rng, count, 0)
    for _ in range(200):
        part, entries = made(rng, count, rng.randint(0, 3))
        start = rng.randint(0, len(expected))
        match rng.choice(["extend", "extend", "write", "truncate", "slice"]):
            case "extend":
                found.extend(part)
                expected.extend(entries)
            case "write":
                found.write(start, part)
                expected[start : start + len(entries)] = entries
            case "truncate":
                found.truncate(start)
                del expected[start:]
            case "slice":
                begin, end = rng.randint(-5, 5), rng.choice([None, rng.randint(-5, 20)])
                assert found[begin:end] == expected[begin:end]
        assert len(found) == len(expected)
        assert [*found] == expected
        assert found == expected
        if expected:
            at = rng.randrange(-len(expected), len(expected))
            assert found[at] == expected[at]
    assert found != [*expected, entries]
    with pytest.raises(IndexError):
        found[len(found)]
    with pytest.raises(ValueError, match=r"index: expected a slice with the step 1, got -1"):
        found[::-1]


def test_slice_is_a_copy():
    found, expected = made(random.Random(1), 2, 4)
    part = found[1:3]
    found.truncate(0)
    assert part == expected[1:3]


def test_tokens_add_no_objects_for_the_garbage_collector():
    found, _ = made(random.Random(2), 5, 1)
    part = found[:]
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        found.extend(part)
    assert len(gc.get_objects()) - before < 10
