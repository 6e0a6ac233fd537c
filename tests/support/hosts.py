"""Two hosts that are both this machine, torchrun on each, and the end of one of them in the middle of a run."""

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from correctness.support.waiting import wait_until
from shardmark.ranks.link import INTERFACE, Host, Link
from tests.support.processes import running
from tests.support.runs import LIMIT, Fresh, torchrun

RATE = "10gbit"
ADDRESS, PORT = "10.64.0.1", 29500  # of the first host, where nothing else listens


@dataclass
class Launch:
    """The processes that torchrun started on one host."""

    host: Host
    process: subprocess.Popen[str]
    tag: str
    """Text in the environment of all these processes, by which they are found."""

    def kill(self, cut: bool) -> None:
        """Kill all of them at once; `cut` takes down the host's link first, as when a machine loses power."""
        if cut:
            down = ["ip", "link", "set", INTERFACE, "down"]
            subprocess.run(["nsenter", f"--net={self.host.namespace}", *down], check=True)
        while left := running(self.tag):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def ends(self) -> str:
        """Wait until all processes of the host have ended, and return what they printed."""
        output, _ = self.process.communicate(timeout=LIMIT)
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
                own = torchrun("--nnodes=2", f"--node-rank={node}", f"--master-addr={ADDRESS}", f"--master-port={PORT}")
                below = ["nsenter", f"--net={host.namespace}", *own]
                run = Fresh(folder, list(arguments), {**ours, **environment, "RUN_TAG": tag}, below)
                launches.append(Launch(host, run.start(), tag))
            yield launches
        finally:
            for launch in launches:
                launch.kill(cut=False)
                launch.process.communicate()
