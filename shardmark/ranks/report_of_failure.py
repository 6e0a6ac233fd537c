"""An exception of a rank as it goes to the test process: its text, and the exception itself where it can be pickled."""

from __future__ import annotations

import pickle
import traceback

import pytest

LONGEST_REPORT = 20_000
"""Characters of a rank's failure that are shown: an exception may hold a whole tensor's text."""
LONGEST_LINE = 500
"""Most characters of the report's first line, which names the exception."""
LONGEST_EXCEPTION = 2**20
"""Most bytes of a pickled exception that an answer includes."""


class SkippedOnRank(Exception):
    """A call to `pytest.skip`, with its reason: pytest's own exception cannot be pickled."""


def report_of(error: BaseException) -> str:
    """The exception and its traceback. An exception that cannot be printed is named alone; long text is cut."""
    try:
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `perform`
        report = traceback.TracebackException(type(error), error, own)
        text = f"raised {''.join(report.format_exception_only()).strip()}\n{''.join(report.format())}"
    except BaseException:
        traceback.clear_frames(error.__traceback__)  # the frames' variables may hold all the memory there is
        frames = "".join(traceback.format_tb(error.__traceback__)[1:])
        text = f"raised {type(error).__qualname__}, which cannot be shown\n{frames}"
    first, _, rest = text.partition("\n")
    if len(first) > LONGEST_LINE:
        first = f"{first[:LONGEST_LINE]}... ({len(first):,} characters)"
    if len(rest) > LONGEST_REPORT:
        rest = f"...\n{rest[-LONGEST_REPORT:]}"
    return f"{first}\n{rest}"


def pickled_exception(error: BaseException) -> bytes | None:
    """The exception; None for one of unusual construction, which travels as text alone."""
    try:
        pickled = pickle.dumps(SkippedOnRank(str(error)) if isinstance(error, pytest.skip.Exception) else error)
        pickle.loads(pickled)
    except BaseException:
        return None
    return pickled if len(pickled) <= LONGEST_EXCEPTION else None
