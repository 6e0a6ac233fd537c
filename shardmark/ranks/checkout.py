"""An earlier version of the code that is measured: a copy of its files, and ranks that import from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from shardmark.api import finding, registry
from shardmark.ranks import private_folder

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, which belong to no version, even inside the repository."""


class CheckoutError(ValueError):
    """A version that is not available; one line."""


@dataclass(frozen=True)
class Checkout:
    """A copy of one version's files: `copy` corresponds to `root`."""

    ref: str
    commit: str
    root: Path
    copy: Path

    def moved(self, path: str) -> str:
        """A path below the root becomes the same path in the copy; other paths, and installed files, stay."""
        return str(self.copy / self._below_root(path)) if self.has(path) else path

    def has(self, path: str) -> bool:
        """Whether the path is one of the repository's, and not an installed file's."""
        return Path(os.path.realpath(path)).is_relative_to(self.root) and not (
            set(INSTALLED) & set(Path(os.path.realpath(path)).parts)
        )

    def _below_root(self, path: str) -> Path:
        return Path(os.path.realpath(path)).relative_to(self.root)

    @property
    def as_it_is(self) -> Checkout:
        """The repository without a copy: ranks that enter it import this version anew, as the others theirs."""
        return Checkout("", "", self.root, self.root)

    def enter(self) -> None:
        """Import the measured code from the copy from now on, whatever this process has imported before. The tool
        itself stays: the same one measures both versions."""
        for name in [name for name, module in sys.modules.items() if self._has(name, module)]:
            del sys.modules[name]
        registry.FAMILIES.clear()
        finding.moved = self.moved
        sys.path[:] = [self.moved(folder or os.getcwd()) for folder in sys.path]
        os.chdir(self.moved(os.getcwd()))

    def _has(self, name: str, module: Any) -> bool:
        """Whether the module belongs to the measured code."""
        spec = getattr(module, "__spec__", None)
        places = [*(getattr(spec, "submodule_search_locations", None) or [])]
        if spec is not None and getattr(spec, "has_location", False):  # not a built-in module
            places.append(spec.origin)
        own = name == "__main__" or name.partition(".")[0] == "shardmark"
        return not own and any(self.has(place) for place in places)

    def remove(self) -> None:
        """Remove the copy."""
        private_folder.remove(self.copy)


def check_out(ref: str, folder: Path) -> Checkout:
    """Copy that commit, branch or tag of the repository around `folder` into a new temporary folder. CheckoutError
    where there is no repository, or no such version in it."""
    root = Path(_git(ref, folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
    commit = _git(ref, folder, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").decode().strip()
    archive = _git(ref, root, "archive", commit)
    copy = private_folder.make("shardmark-ref-").resolve()
    checkout = Checkout(ref, commit, root.resolve(), copy)
    try:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
            files.extractall(copy)
    except BaseException as error:
        checkout.remove()
        if not isinstance(error, Exception):
            raise
        raise CheckoutError(f"--against-ref {ref}: its files cannot be written: {error}") from None
    return checkout


def _git(ref: str, folder: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise CheckoutError(f"--against-ref {ref} needs git, and there is none") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise CheckoutError(f"--against-ref {ref}: {said[0].removeprefix('fatal: ')}") from None
    except ValueError as error:  # a null character in the name
        raise CheckoutError(f"--against-ref {ref}: {error}") from None
