"""NCCL's warnings, and a small /dev/shm, in the error of a world; with a fake log, as there may be no GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardmark.ranks import nccl
from shardmark.ranks.rank import WORLD_VARIABLE
from shardmark.ranks.world import RankError, World

WARNING = "[2026-01-02 03:04:05] host:17:42 [1] misc/shmutils.cc:87 NCCL WARN Call to posix_fallocate failed: No space"
DIED = RankError("rank 0 of 2 was killed by SIGABRT", 0)
RAISED = RankError("rank 0 of 2 raised DistBackendError: NCCL error in: NCCLUtils.cpp:94", 0, RuntimeError())
OTHER = RankError("rank 0 of 2 raised ValueError: shapes differ", 0, ValueError())


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free bytes of /dev/shm."""

    def set_room(free: int) -> None:
        monkeypatch.setattr(nccl.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096))

    return set_room


def test_each_warning_is_shown_once_and_the_others_are_counted(tmp_path: Path, room: Callable[[int], None]) -> None:
    room(2**31)
    (tmp_path / "rank0.nccl").write_text("NCCL version 2.29.7+cuda13.0\nhost NCCL INFO channel\n")
    assert nccl.explanation(tmp_path, DIED) == ""
    (tmp_path / "rank1.nccl").write_text(f"{WARNING}\n" * 2 + "".join(f"h NCCL WARN {i}\x1b[31m\n" for i in range(4)))
    assert nccl.explanation(tmp_path, DIED).splitlines() == [
        "NCCL warns on rank 1: Call to posix_fallocate failed: No space",
        r"NCCL warns on rank 1: 0\x1b[31m",
        r"NCCL warns on rank 1: 1\x1b[31m",
        "NCCL warns 2 times more",
    ]


def test_little_shared_memory_is_said_where_nccl_fails(
    tmp_path: Path, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    room(60 * 2**20)
    says = "/dev/shm has 60 MiB free, and NCCL may need more: in Docker give the container --shm-size=1g or --ipc=host"
    assert nccl.explanation(tmp_path, RAISED) == says
    assert nccl.explanation(tmp_path, OTHER) == ""
    room(2**30)
    assert nccl.explanation(tmp_path, RAISED) == ""
    monkeypatch.undo()
    monkeypatch.setattr(nccl, "SHARED_MEMORY", tmp_path / "none")
    assert nccl.explanation(tmp_path, RAISED).endswith("none, through which NCCL's ranks share memory")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without NCCL's variables, and restored."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def chosen() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def test_nccl_logs_its_warnings_to_the_worlds_folder(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    nccl.prepare(tmp_path, 3)
    log = str(tmp_path / "rank3.nccl")
    assert chosen() == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": log}


def test_the_users_choices_stay(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    users = {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}
    for name, value in users.items():
        environment.setenv(name, value)
    nccl.prepare(tmp_path, 0)
    assert chosen() == users


def log_and_fail() -> None:
    rank = dist.get_rank()
    Path(os.environ[WORLD_VARIABLE], f"rank{rank}.nccl").write_text(WARNING)
    raise RuntimeError("NCCL error: unhandled system error")


def log_and_die() -> None:
    Path(os.environ[WORLD_VARIABLE], "rank0.nccl").write_text(WARNING)
    os._exit(3)


@pytest.mark.parametrize("function", [log_and_fail, log_and_die])
def test_the_error_of_a_world_ends_with_what_nccl_says(
    function: Callable[[], None], room: Callable[[int], None]
) -> None:
    room(2**20)
    with World(2) as world:
        world.device = "cuda"  # all that is fake: its ranks are on the CPU
        with pytest.raises(RankError) as caught:
            world.run(function)
    *report, warning, shortage = str(caught.value).splitlines()
    assert report[0].startswith("rank ") and "NCCL warns" not in "".join(report)
    assert warning == "NCCL warns on rank 0: Call to posix_fallocate failed: No space"
    assert shortage.startswith("/dev/shm has 1 MiB free")
