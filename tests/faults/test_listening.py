"""Access to a run: its listening sockets, who may read its files, and which messages are unpickled."""

import os
import stat
from pathlib import Path

import pytest

from shardmark.ranks.world import World, available_ranks
from tests.support.processes import listeners, parent_of
from tests.support.runs import Fresh, torchrun

LOOPBACK = {"127.0.0.1", "::1"}


def test_only_the_loopback_interface_and_private_folders_hear_anything(pair: World) -> None:
    addresses, sockets = listeners([*pair.pids, parent_of(pair.pids[0])])
    assert addresses <= LOOPBACK
    for path in sockets:
        folder = Path(path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    files = [pair._directory, *pair._directory.rglob("*")]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o700
    assert len(files) > 1 and all(file.stat().st_uid == os.getuid() for file in files)


CONFTEST = 'pytest_plugins = ["shardmark.plugin"]'

TESTS = """
import os
import pickle
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.processes import listeners, own_addresses
from tests.support.ranks import identity
from shardmark.ranks.rank import WorldError


class Bomb:
    def __reduce__(self):
        return open, ("exploded", "w")


def test_only_torchruns_store_is_heard_elsewhere(worlds):
    assert worlds(2).run(own_addresses) == [["127.0.0.1"]] * 2
    assert listeners([os.getppid()])[0], "torchrun's store"


def test_the_key_is_nowhere_on_disk(worlds):
    assert not list(Path(tempfile.gettempdir()).glob("shardmark*"))


def late_on_rank_1():
    if int(os.environ["RANK"]):
        time.sleep(2)  # rank 0 reads what is there before


def test_what_nobody_of_this_launch_has_written_is_not_unpickled(worlds):
    world = worlds(2)
    world._store.set(f"{world._call}/1", pickle.dumps(Bomb()))
    with pytest.raises(WorldError, match=r"^message \\d+/1 was not written by a process of this launch$"):
        world.run(late_on_rank_1)
    assert not Path("exploded").exists()
    assert [rank for rank, _, _ in world.run(identity)] == [0, 1]


def leave_a_group_behind():
    import torch.distributed as dist

    dist.destroy_process_group()


def test_that_leaves_no_group(worlds):
    with pytest.warns(UserWarning, match="another process group, or none"):
        worlds(2).run(leave_a_group_behind)


def test_that_would_have_met_it(worlds):
    worlds(2).run(identity)
"""


@pytest.mark.sweep
def test_under_torchrun_sealed_calls_alone_are_unpickled(tmp_path: Path) -> None:
    if available_ranks("cpu") < 2:
        pytest.skip("needs two ranks")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_launch.py").write_text(TESTS)
    arguments, environment = ["-rs", f"--rootdir={tmp_path}"], {"TMPDIR": str(tmp_path / "tmp")}
    ended = Fresh(tmp_path, arguments, environment, below=torchrun("--standalone")).run()
    assert ended.status == 0 and "4 passed, 1 skipped" in ended.output, ended.output
    reason = "leave_a_group_behind has ended torchrun's ranks, which cannot be replaced from here"
    assert reason in ended.output and not list((tmp_path / "tmp").glob("shardmark*"))
