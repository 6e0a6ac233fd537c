"""One virtual environment for every tox environment that runs the suite: torch is gigabytes.

tox makes an environment anew when another one has used its directory. This runner keeps it, as all that use it install
the same requirements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class _NamelessInfo(Info):
    """What tox remembers of an environment, without the name of the one that made it."""

    @contextmanager
    def compare(self, value: Any, section: str, sub_section: str | None = None) -> Iterator[tuple[bool, Any]]:
        if section == "ToxEnv":
            value = {**value, "name": "shared"}
        with super().compare(value, section, sub_section) as result:
            yield result


class SharedVirtualEnv(VirtualEnvRunner):
    """`runner = shared-virtualenv`."""

    @staticmethod
    def id() -> str:
        return "shared-virtualenv"

    @property
    def cache(self) -> Info:
        return _NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Make the runner known."""
    register.add_run_env(SharedVirtualEnv)
