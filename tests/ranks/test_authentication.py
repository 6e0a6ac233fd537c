"""Messages between launched processes: opened only where one of them has written them."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from shardmark.ranks import authentication as seal
from shardmark.ranks.authentication import VARIABLE, Seal, forget_key, launch_key, of_this_launch
from shardmark.ranks.rank import WorldError


def test_a_sealed_message_opens_with_its_key_under_its_name_alone() -> None:
    sealed = Seal(b"key").seal(b"message", "1")
    assert Seal(b"key").open(sealed, "1") == b"message"
    changed = sealed[:-1] + b"E"
    for other, message, name in (
        (b"yek", sealed, "1"),
        (b"key", sealed, "2"),
        (b"key", changed, "1"),
        (b"key", b"", "1"),
    ):
        with pytest.raises(WorldError, match=r"^message \d was not written by a process of this launch$"):
            Seal(other).open(message, name)


def test_a_message_of_another_launch_does_not_open_though_the_key_is_the_same() -> None:
    store = dist.HashStore()
    launch = of_this_launch(store, 0, 1)
    sealed = Seal(b"key", launch).seal(b"message", "1")
    assert Seal(b"key", launch).open(sealed, "1") == b"message"
    with pytest.raises(WorldError, match="not written by a process of this launch"):
        Seal(b"key", of_this_launch(store, 0, 1)).open(sealed, "1")


def test_the_key_is_a_file_of_this_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(seal, "_file", lambda: tmp_path / "launch.key")
    key = launch_key(first=True, one_machine=True)
    assert len(key) == 64 and launch_key(first=False, one_machine=True) == key
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(WorldError, match=f"{file} is not this user's alone"):
        launch_key(first=False, one_machine=True)
    forget_key()
    assert not list(tmp_path.iterdir())


def test_several_machines_need_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(WorldError, match=f"^ranks on several machines need .* {VARIABLE} to the same on each$"):
        launch_key(first=True, one_machine=False)
    monkeypatch.setenv(VARIABLE, "secret")
    with pytest.raises(WorldError, match=r"^SHARDMARK_KEY has 6 bytes, and a secret has 16 at least$"):
        launch_key(first=True, one_machine=False)
    monkeypatch.setenv(VARIABLE, "a secret, longer")
    assert launch_key(first=True, one_machine=False) == b"a secret, longer"


def _name(results: multiprocessing.SimpleQueue) -> None:
    results.put(str(seal._file()))


def test_all_processes_of_a_launch_look_in_one_place() -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    for _ in range(2):
        process = context.Process(target=_name, args=(results,))
        process.start()
        process.join()
    names = {results.get(), results.get()}
    assert len(names) == 1 and f"-{os.getpid()}-" in names.pop()
