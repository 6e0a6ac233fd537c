"""The link between two hosts: who lives where, what it lets through, what remains of it, and what it cannot be."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardmark.ranks.link import Link, LinkError
from shardmark.ranks.world import World
from tests.support.links import makes_links
from tests.support.processes import own_addresses


def namespace() -> str:
    """The network namespace that this thread is in, as the kernel names it."""
    return os.readlink("/proc/thread-self/ns/net")


def is_held(namespace: str) -> bool:
    """Whether a process is in that namespace, or has it open."""
    for link in (name for where in ("ns/net", "fd/*") for name in Path("/proc").glob(f"[0-9]*/{where}")):
        try:
            if os.readlink(link) == namespace:
                return True
        except OSError:  # the process, or its file, is gone by now
            continue
    return False


def gigabits_per_second(megabytes: int, both_ways: bool) -> float:
    """The rate at which rank 0 sends, and with `both_ways` rank 1 too, until all has arrived: the best of five."""
    rank = dist.get_rank()
    sent, received = (torch.zeros(megabytes * 10**6, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        # Receiving first: Gloo says that it is ready to receive on the same connection, after what it already sends.
        works = [dist.irecv(received, 1 - rank)] if rank == 1 or both_ways else []
        works += [dist.isend(sent, 1 - rank)] if rank == 0 or both_ways else []
        for work in works:
            work.wait()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return 8e6 * megabytes / 1e9 / min(seconds)


@makes_links
def test_ranks_live_on_two_hosts_and_talk_over_the_link() -> None:
    here = namespace()
    with Link("1gbit") as link, World(3, link=link) as world:
        hosts = [os.readlink(host.namespace) for host in link.hosts]
        assert world.run(namespace) == [hosts[0], hosts[0], hosts[1]]
        assert world.run(own_addresses) == [["10.64.0.1"], ["10.64.0.1"], ["10.64.0.2"]]
        assert len({here, *hosts}) == 3 and namespace() == here


@makes_links
@pytest.mark.parametrize("both_ways", [False, True], ids=["one_way", "both_ways"])
def test_it_lets_through_its_rate_in_each_direction_and_no_more(both_ways: bool) -> None:
    with Link("1gbit") as link, World(2, link=link) as world:
        assert 0.85 <= max(world.run(gigabits_per_second, 8, both_ways)) <= 1.0


@makes_links
def test_nothing_remains_of_it_when_it_is_closed() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with Link("1gbit") as link:
        hosts = [os.readlink(host.namespace) for host in link.hosts]
        assert all(map(is_held, hosts))
        mounts = Path("/proc/self/mountinfo").read_text()
        assert not any(host in mounts for host in hosts)  # processes alone hold them, so they end with those
    link.close()  # once more does no harm
    assert not any(map(is_held, hosts)) and len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("rate", ["fast", "0gbit", "1gbps", "-1gbit", "1 gbit", "1gbit; reboot", "1kbit", ""])
def test_a_rate_that_is_none_is_one_line(rate: str) -> None:
    with pytest.raises(LinkError) as caught:
        Link(rate)
    assert str(caught.value) == f"a link's rate is written as 1gbit or 100mbit, not {rate!r}"


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("os.geteuid", lambda: 1000, "a link between two hosts is made by root, and this user is not"),
        ("sys.platform", "darwin", "a link needs Linux's network namespaces, and this is darwin"),
        ("shutil.which", lambda name: None, "a link needs iproute2, and there is no ip and no tc on this machine"),
    ],
    ids=["not_root", "not_linux", "no_iproute2"],
)
def test_a_machine_that_cannot_make_one_is_one_line(
    where: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(where, value)
    with pytest.raises(LinkError) as caught:
        Link("1gbit")
    assert str(caught.value) == message


@makes_links
def test_what_the_kernel_refuses_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "tc"
    refuses.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        LinkError, match=r"no link: `tc qdisc .*` says Error: Specified qdisc kind is unknown\.$"
    ) as caught:
        Link("1gbit")
    assert "\n" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == files
