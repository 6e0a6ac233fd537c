"""Another version's ranks import that version's code, and nothing of this one's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.ranks.checkout import CheckoutError, check_out
from tests.support.repository import commit


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a version "before" and a newer one; one file of the newer is in no commit."""
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    (root / "mine.py").write_text("VERSION = 'before'\n")
    (root / "package" / "inner.py").write_text("VERSION = 'before'\n")  # a folder without __init__.py
    commit(root, tag="before")
    (root / "mine.py").write_text("VERSION = 'now'\n")
    (root / "package" / "inner.py").write_text("VERSION = 'now'\n")
    (root / "later.py").write_text("")
    return root


def run(folder: Path, code: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENTERED = """
from pathlib import Path
import os
import mine, package.inner
from shardmark.ranks.checkout import check_out
check_out("before", Path.cwd()).enter()
"""


def test_what_was_imported_is_imported_anew_from_there(repository: Path) -> None:
    says = "import mine, package.inner; print(mine.VERSION, package.inner.VERSION, os.path.basename(os.getcwd()))"
    assert run(repository, f"import mine; print(mine.VERSION)\n{ENTERED}\n{says}").split()[:3] == [
        "now",
        "before",
        "before",
    ]


def test_what_was_not_there_yet_is_not_found(repository: Path) -> None:
    assert "none" in run(repository, f"{ENTERED}\ntry:\n    import later\nexcept ImportError:\n    print('none')")


def test_the_instruments_and_libraries_stay(repository: Path) -> None:
    same = "import sys, torch, shardmark.api.registry as r\nbefore = torch, r\n"
    assert "same" in run(
        repository,
        f"{same}{ENTERED}\nimport torch, shardmark.api.registry as r\n"
        "print('same' if before == (torch, r) else 'other')",
    )


def test_the_copy_is_of_the_repository_whatever_folder_of_it_one_is_in(repository: Path) -> None:
    checkout = check_out("before", repository / "package")
    assert checkout.root == repository.resolve()
    assert (checkout.copy / "mine.py").read_text() == "VERSION = 'before'\n"
    assert checkout.moved(str(repository / "mine.py")) == str(checkout.copy / "mine.py")
    installed = str(repository / "venv" / "lib" / "site-packages" / "torch.py")
    assert checkout.moved(installed) == installed and checkout.moved("/usr/lib") == "/usr/lib"


@pytest.mark.parametrize("ref", ["nonesuch", "", "-h", "before:mine.py", "a\0b"])
def test_a_version_that_there_is_not_is_one_line(repository: Path, ref: str) -> None:
    with pytest.raises(CheckoutError) as caught:
        check_out(ref, repository)
    assert str(caught.value).startswith("--against-ref ") and "\n" not in str(caught.value)


def test_a_folder_of_no_repository_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match="--against-ref HEAD: not a git repository"):
        check_out("HEAD", tmp_path)
