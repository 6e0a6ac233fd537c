"""Bytes that this process has sent over TCP, as the kernel counts them: what a backend really moves between ranks."""

from __future__ import annotations

import os
import socket
import struct

_TCP_INFO_BYTES_SENT = 200
"""Where `tcpi_bytes_sent` and `tcpi_bytes_retrans` (Linux 4.19) lie in the kernel's struct tcp_info."""


def tcp_bytes_sent() -> int:
    """Payload bytes sent over all open connections of this process; a retransmission is not counted again."""
    return sum(map(_bytes_sent, os.listdir("/proc/self/fd")))


def _bytes_sent(descriptor: str) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(int(descriptor))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, sent_again = struct.unpack_from("QQ", info, _TCP_INFO_BYTES_SENT)
            return sent - sent_again
    except OSError:  # closed in the meantime, or no TCP
        return 0
