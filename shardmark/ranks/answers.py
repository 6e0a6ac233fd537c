"""Unpickle what a rank has sent: its types may do anything when they are made here, and may not end."""

from __future__ import annotations

import pickle
import threading

from shardmark.ranks.rank import Answer

AT_LEAST = 1.0
"""Seconds that an answer gets in any case, when it comes just before its deadline."""


def unpickled(message: bytes | bytearray, seconds: float) -> Answer:
    """The rank's answer, or, where it is not made in that time, one that says why there is none.

    A thread unpickles, so that an answer may take its time, or raise KeyboardInterrupt, and the user's Ctrl-C still
    reaches this one.
    """
    found: list[Answer] = []

    def unpickle() -> None:
        try:
            answer = pickle.loads(message)
        except BaseException as error:
            found.append(unusable(f"sent a reply that cannot be unpickled here: {error!r}"))
        else:
            found.append(answer if isinstance(answer, Answer) else unusable("sent an invalid reply"))

    thread = threading.Thread(target=unpickle, daemon=True)
    thread.start()
    thread.join(seconds := max(AT_LEAST, seconds))
    return found[0] if found else unusable(f"sent a reply that was not unpickled here within {seconds:.1f} s")


def unusable(what: str) -> Answer:
    """An answer of a rank that did something else."""
    return Answer(failure=(what, None), broken="an unknown state")
