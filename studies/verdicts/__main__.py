"""See `studies.verdicts`."""

from __future__ import annotations

import argparse
from pathlib import Path

from studies.verdicts import planted, report, runs

FOLDER = Path("docs/verdicts")


def main() -> None:
    """Add runs, write what is said of planted changes, or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.verdicts", description=__import__("studies.verdicts").__doc__
    )
    parser.add_argument("what", choices=["runs", "planted", "report"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--real-time", action="store_true", help="the ranks before all ordinary processes")
    chosen = parser.parse_args()
    match chosen.what:
        case "runs":
            runs.run(FOLDER / "runs.jsonl", chosen.minutes, chosen.real_time)
        case "planted":
            planted.write(FOLDER / "planted.txt")
        case "report":
            report.write(FOLDER)


if __name__ == "__main__":
    main()
