"""Whether links between hosts can be made here."""

import shutil
import subprocess

import pytest

PROBE = (
    "ip link add end0 type veth peer name end1 && tc qdisc add dev end0 root tbf rate 1gbit burst 256kb latency 50ms"
)
"""Commands that a link needs, run in a namespace that ends with them."""


def _can_make_links() -> bool:
    commands = all(shutil.which(command) for command in ("unshare", "ip", "tc"))
    return commands and not subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True).returncode


makes_links = pytest.mark.skipif(
    not _can_make_links(), reason="a link needs root, iproute2, and a kernel with veth and tbf"
)
