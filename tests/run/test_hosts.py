"""Claims about Slurm host lists: every form Slurm writes is expanded in order, anything else is one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import LaunchError
from weft.run.hosts import expand

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ("localhost",)),
        ("a,b", ("a", "b")),
        ("node[01-04,07]", ("node01", "node02", "node03", "node04", "node07")),
        ("node[8-11]", ("node8", "node9", "node10", "node11")),
        ("node[098-101]-ib", ("node098-ib", "node099-ib", "node100-ib", "node101-ib")),
        ("gpu[1-2],login,cpu[3]", ("gpu1", "gpu2", "login", "cpu3")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
    ],
)
def test_lists_that_slurm_writes(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "a,", "n[1-2", "n1-2]", "n[]", "n[a-b]", "n[2-1]", "n[1[2]]", "n[-3]"]
)
def test_anything_else_is_refused_with_the_text(text):
    with pytest.raises(LaunchError) as caught:
        expand(text)
    assert repr(text) in str(caught.value)


@given(st.lists(NAMES, min_size=1))
def test_plain_names_come_back(names):
    assert expand(",".join(names)) == tuple(names)


@given(NAMES, st.integers(0, 500), st.integers(0, 60), st.integers(1, 5))
def test_a_range_holds_every_number_once_at_its_width(name, first, length, width):
    low, high = f"{first:0{width}}", f"{first + length:0{width}}"
    hosts = expand(f"{name}[{low}-{high}]")
    assert [int(host.removeprefix(name)) for host in hosts] == list(range(first, first + length + 1))
    assert all(len(host) >= len(name) + width for host in hosts)


@given(st.lists(st.tuples(NAMES, st.lists(st.integers(0, 99), min_size=1, max_size=4)), min_size=1, max_size=4))
def test_a_list_is_the_words_one_after_the_other(words):
    texts = [f"{name}[{','.join(map(str, numbers))}]" for name, numbers in words]
    assert expand(",".join(texts)) == sum((expand(text) for text in texts), ())
