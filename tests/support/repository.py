"""Repositories of git for tests."""

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> None:
    """Run git there, as somebody."""
    own = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *own, *arguments], check=True, capture_output=True)


def commit(folder: Path, tag: str) -> None:
    """Commit all that the folder has, and tag it; it becomes a repository if it is none."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", tag)
    git(folder, "tag", tag)
