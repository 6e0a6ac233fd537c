"""Prints, for each of two ranks, the cores that it may use and the scheduling policies of its threads: JSON."""

import json
import os

from shardmark.ranks.world import World


def its_cores_and_policies() -> tuple[list[int], list[int]]:
    """The cores that this rank may use, and the policies of all its threads, those of the process group among them."""
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    assert len(threads) > 1
    return sorted(os.sched_getaffinity(0)), sorted({os.sched_getscheduler(thread) for thread in threads})


if __name__ == "__main__":
    with World(2) as world:
        print(json.dumps(world.run(its_cores_and_policies)))
