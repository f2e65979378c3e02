"""Hostfiles and filters mean what DeepSpeed takes them to mean, and mistakes are named."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.launch.hosts.hostfile import Fleet, Host, parse_hostfile, select

TEXT = """
# the cluster
worker-0 slots=4   # the first
worker-1   slots=2

10.0.0.7 slots=1
"""
HOSTS = parse_hostfile(TEXT, source="hosts")


def test_hosts_in_their_order_with_their_slots():
    assert list(HOSTS) == [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1)), Host("10.0.0.7", (0,))]
    assert Fleet(HOSTS, Path("hosts")).processes == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a slots=2\na slots=1", "hosts, line 2: a is listed twice"),
        ("a slots=0", "hosts, line 1: a has slots=0"),
        ("b slots=1\na slots=99999999999", "hosts, line 2: a has slots=99999999999: give 1,024 at most"),
        (f"a slots={'9' * 5000}", "is not a host with its GPUs"),
        ("\na 8", "hosts, line 2: 'a 8' is not a host with its GPUs: write HOST slots=8"),
        ("a slots=8 max_slots=9", "write HOST slots=8"),
        ("-oProxyCommand=x slots=1", "write HOST slots=8"),  # would be an option of ssh's
        ("$(reboot) slots=1", "write HOST slots=8"),
        ("a[1-3] slots=1", "write HOST slots=8"),  # the pdsh of plain deepspeed would make three of it
        ("me@a slots=1", "write a, and put `User me` into ~/.ssh/config"),
        ("# nobody\n", "hosts names no host"),
    ],
)
def test_a_line_that_cannot_be_meant_is_named(text: str, sentence: str):
    with pytest.raises(UserError) as caught:
        parse_hostfile(text, source="hosts")
    assert sentence in str(caught.value)


def test_filters():
    assert select(HOSTS) == HOSTS
    assert select(HOSTS, include="worker-1@worker-0:0,2") == (Host("worker-0", (0, 2)), Host("worker-1", (0, 1)))
    assert select(HOSTS, include="worker-0:1@worker-0:3") == (Host("worker-0", (1, 3)),)
    assert select(HOSTS, exclude="worker-0:0@10.0.0.7") == (Host("worker-0", (1, 2, 3)), Host("worker-1", (0, 1)))
    assert select(HOSTS, exclude="worker-1:0,1") == (HOSTS[0], HOSTS[2])


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "--include, --exclude: give one of them"),
        ({"include": "worker-2"}, "has no host 'worker-2': did you mean worker-"),
        ({"include": "zzz"}, "has no host 'zzz': it has worker-0, worker-1, 10.0.0.7"),
        ({"include": "worker-1:2"}, "worker-1 has no slot 2: hosts gives it 2, from 0"),
        ({"exclude": "worker-1:x"}, "'x' are not slots: write worker-1:0,2"),
        ({"exclude": "worker-1:"}, "'' are not slots"),
        ({"include": f"worker-1:{'9' * 5000}"}, "are not slots"),
        ({"exclude": "worker-0@worker-1@10.0.0.7"}, "no slot of hosts is left"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused(filters: dict[str, str], sentence: str):
    with pytest.raises(UserError) as caught:
        select(HOSTS, **filters, source="hosts")
    assert sentence in str(caught.value)


POOL = st.dictionaries(st.sampled_from(["a", "b-1", "c.d", "10.0.0.1"]), st.integers(1, 4), min_size=1)


@settings(deadline=None)  # the first example imports deepspeed
@given(POOL, st.data())
def test_deepspeed_reads_them_the_same(pool: dict[str, int], draw: st.DataObject):
    from deepspeed.launcher.runner import (  # pyright: ignore[reportMissingImports]
        _parse_hostfile,
        parse_inclusion_exclusion,
    )

    lines = [f"{name} slots={slots}" for name, slots in pool.items()]
    assert {host.name: len(host.slots) for host in parse_hostfile("\n".join(lines), source="x")} == _parse_hostfile(
        lines
    )
    parts = draw.draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    slots = {name: draw.draw(st.lists(st.integers(0, pool[name] - 1), unique=True)) for name in parts}
    text = "@".join(name + (f":{','.join(map(str, slots[name]))}" if slots[name] else "") for name in parts)
    option = draw.draw(st.sampled_from(["include", "exclude"]))
    theirs = parse_inclusion_exclusion(
        pool, **{"inclusion": "", "exclusion": "", f"{option.removesuffix('de')}sion": text}
    )
    hosts = parse_hostfile("\n".join(lines), source="x")
    if not theirs:
        with pytest.raises(UserError):
            select(hosts, **{option: text})
        return
    assert [(host.name, list(host.slots)) for host in select(hosts, **{option: text})] == list(theirs.items())
