"""Two hosts that are both this machine, torchrun on each, and the end of one of them in the middle of a run."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from correctness.support.waiting import wait_until
from shardmark.ranks.link import INTERFACE, Host, Link
from tests.support.processes import running
from tests.support.runs import OPTIONS, environment_of_a_run

RATE = "10gbit"
ADDRESS, PORT = "10.64.0.1", 29500  # of the first host, where nothing else listens
LIMIT = 300.0
"""Seconds after which a launch counts as hung."""


@dataclass
class Launch:
    """What torchrun started on one host."""

    host: Host
    process: subprocess.Popen[str]
    tag: str
    """In the environment of all its processes."""

    def kill(self, cut: bool) -> None:
        """End all that runs there at once; with `cut` nobody hears of it, as of a machine without power."""
        if cut:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._cut).result()
        while left := running(self.tag):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _cut(self) -> None:
        self.host.enter()
        subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)

    def ends(self, seconds: float = LIMIT) -> str:
        """Wait until all processes of the host have ended, and return what they printed."""
        output, _ = self.process.communicate(timeout=seconds)
        assert wait_until(lambda: not running(self.tag), 20), "a rank has outlived its torchrun"
        return output


@contextmanager
def two_hosts(folder: Path, *arguments: str, **environment: str | None) -> Iterator[list[Launch]]:
    """`torchrun --nnodes 2 --nproc-per-node 2 -m pytest` on both, with a key of their own."""
    ours = {"GLOO_SOCKET_IFNAME": INTERFACE, "SHARDMARK_KEY": uuid.uuid4().hex, "TORCHELASTIC_ERROR_FILE": None}
    launches: list[Launch] = []
    with Link(RATE) as link:
        try:
            for node, host in enumerate(link.hosts):
                tag = uuid.uuid4().hex
                command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
                command += [f"--node-rank={node}", f"--master-addr={ADDRESS}", f"--master-port={PORT}"]
                process = subprocess.Popen(
                    [*command, "-m", "pytest", *OPTIONS, *arguments],
                    cwd=folder,
                    env=environment_of_a_run(**{**ours, **environment, "RUN_TAG": tag}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=host.enter,
                )
                launches.append(Launch(host, process, tag))
            yield launches
        finally:
            for launch in launches:
                launch.kill(cut=False)
                launch.process.communicate()
