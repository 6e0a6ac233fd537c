"""Estimate the bytes that NCCL takes on a GPU, outside PyTorch's allocator, from its public sources and logs.

A communicator has channels. A channel has, for each rank that it connects to, receive buffers for three protocols:

    Simple    4 MiB (NCCL_BUFFSIZE)
    LL        8 lines x 512 threads x 8 steps x 16 bytes   (src/include/device.h)
    LL128     120 elements x 640 threads x 8 steps x 8 bytes

Together they take 9.2 MiB, which is 10 MiB in pages of 2 MiB, and sending takes one more page: NCCL's own log of
allocations says 10,485,760 and 2,097,152 bytes (NVIDIA/nccl#1685). A ring has one connection to each side, a tree its
reverse. On NVSwitch from Hopper on, with more than two GPUs of a node, NVLink SHARP has 2 x 1 MiB more for each of 16
channels and each of these GPUs (src/transport/nvls.cc).

Not counted are connections of `send` and `receive`, as in all-to-all, the network's buffers, and a second communicator,
such as each further process group's. Compared with reports, each of one version:

    8 H100: 832 MiB here; some 0.5 GiB beside the context, where ring and NVLink SHARP are connected (nccl#1685)
    4 A100: 576 MiB here; 688 MiB (nccl#964), of a version that connected all it knows from the beginning

Since NCCL 2.22 an algorithm is connected when it is first used, so this estimate is rather too large.
"""

from __future__ import annotations

import math

from shardmark.meter.hardware import CONTEXT, Hardware

MIB = 2**20
CONNECTION = 12 * MIB
"""Bytes to receive from one rank and to send to another, in one channel."""
LINK = 25e9
"""Bytes/s of one NVLink in one direction, from Volta to Hopper (a Blackwell's counts as two), and of PCIe's half."""
MOST_CHANNELS = 24
"""Channels seen on A100 and H100 (nccl#1259): half as many are found by search, and each is doubled (nccl#1041)."""
SHARP_CHANNELS, SHARP_BUFFERS = 16, 2 * MIB


def communicator_bytes(on: Hardware, ranks: int) -> int:
    """Bytes on one GPU for collectives among that many ranks; 0 on a CPU and for one rank."""
    if on.device != "cuda" or ranks == 1:
        return 0
    channels = min(2 * math.ceil(on.link / LINK), MOST_CHANNELS)
    connections = 1 if ranks == 2 else 2  # of two ranks each is on both sides of the other
    in_node = min(ranks, on.devices_per_node)
    switched = on.capability is not None and on.capability >= (9, 0) and on.link / LINK > MOST_CHANNELS / 2
    sharp = SHARP_CHANNELS * SHARP_BUFFERS * in_node if switched and in_node > 2 else 0
    return channels * connections * CONNECTION + sharp


def room(on: Hardware, ranks: int = 1) -> int:
    """Bytes of the device left for PyTorch's allocator, beside CUDA's context and NCCL's buffers for those ranks."""
    return int(on.memory_bytes) - (CONTEXT if on.device == "cuda" else 0) - communicator_bytes(on, ranks)
