"""Records of machines: newer rows replace older ones, no host is named, and documents agree with the rows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perf.schema import complaints
from shardmark.report.markdown import markdown
from shardmark.rows.reader import LISTS, read_run
from studies import record
from studies.record import DOCUMENTS, README_MACHINE, RECORDS, ROOT, compacted, main, merged, with_findings
from tests.support.entries import entry, timed


def _rows(**rows: int) -> list[dict[str, object]]:
    return [{"fullname": name, "group": name, "value": value} for name, value in rows.items()]


def test_rows_of_other_tests_stay() -> None:
    older = {"machine_info": "old", "benchmarks": _rows(a=1, b=1), "unmeasured": _rows(c=1), "outcomes": {}}
    newer = {"machine_info": "new", "benchmarks": _rows(b=2, c=2), "unmeasured": _rows(d=2), "outcomes": {}}
    assert merged(older, newer) == {
        "machine_info": "new",
        "benchmarks": _rows(a=1, b=2, c=2),
        "unmeasured": _rows(d=2),
        "questions": [],
    }


def test_an_answer_stays_that_is_of_all_its_rows() -> None:
    questions = [{"text": text, "answer": text, "lines": ["a line"]} for text in ("a", "b")]
    older = {"benchmarks": [{"fullname": "1", "group": "a"}, {"fullname": "2", "group": "b"}], "questions": questions}
    newer = {"benchmarks": [{"fullname": "3", "group": "b"}], "questions": questions[1:]}
    assert merged(older, newer)["questions"] == [questions[0], {"text": "b", "answer": None, "lines": []}]


def test_a_first_record_is_the_run() -> None:
    newer = {"benchmarks": _rows(a=1), "unmeasured": [], "questions": [], "outcomes": {"failed": {}}}
    assert merged({}, newer) == newer | {"questions": []}


def test_a_record_names_no_host_and_has_no_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = entry("eager")
    each["stats"]["data"] = [1.0] * 1000
    run = {
        "machine_info": {"node": "a-host", "cpu": {"brand_raw": "A processor", "flags": ["f"] * 99}, "cores": 2},
        "commit_info": {"author": "somebody"},
        "benchmarks": [{**each, "options": {"timer": "device_clock"}}],
        "unmeasured": [],
    }
    kept = compacted(run)
    assert kept["machine_info"] == {"cores": 2, "cpu": {"brand_raw": "A processor"}}
    assert kept["benchmarks"] == [{**each, "stats": timed(1.0)}]
    (tmp_path / "out.json").write_text(json.dumps(run))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(record, "DOCUMENTS", tmp_path)
    assert main(["--keep", str(tmp_path / "out.json"), "Two Cores"]) == 0
    assert read_run(tmp_path / "records" / "two-cores.json.gz") == kept
    assert "| What does a nap cost? | Eager takes 1,000 ms. |" in (tmp_path / "results-two-cores.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--keep"], "python -m studies.record --keep takes the file of a run and the machine's name"),
        (["--keep", "none.json", "here"], "python -m studies.record: none.json: No such file or directory"),
    ],
    ids=["nothing", "no_file"],
)
def test_what_cannot_be_kept_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 4
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json.gz")), ids=lambda path: path.name)
def test_each_document_says_what_its_record_has(path: Path) -> None:
    """To write it: python -m shardmark.report studies/records/NAME.json.gz -o docs/results-NAME.md"""
    run = read_run(path)
    document = DOCUMENTS / f"results-{path.name.removesuffix('.json.gz')}.md"
    assert document.read_text(encoding="utf-8") == markdown([(path.name, run)])
    assert [line for each in LISTS for row in run[each] for line in complaints(row["extra_info"])] == []
    assert "node" not in run["machine_info"] and "commit_info" not in run


def test_readmes_findings_are_those_of_its_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_findings(text, read_run(RECORDS / f"{README_MACHINE}.json.gz")) == text


def test_readme_is_read_in_one_sitting() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    read = [line for line in lines if not re.match(r"\[[^]]+\]: ", line)]
    assert len(read) <= 200 and max(map(len, lines)) <= 110


def test_the_row_that_is_explained_is_as_the_schema_says() -> None:
    text = (DOCUMENTS / "rows.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^    \{\n.*?^    \}\n", text, flags=re.M | re.S)
    assert list(complaints(json.loads(example))) == []


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCUMENTS.glob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(document: Path) -> None:
    assert [path for path in linked(document) if not path.exists()] == []


def linked(document: Path) -> list[Path]:
    """The files that a document links to."""
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.M)
    return [(document.parent / link).resolve() for link in links if "://" not in link]


def test_each_page_can_be_reached_from_readme() -> None:
    reached = [ROOT / "README.md"]
    for page in reached:  # which grows
        reached += [path for path in linked(page) if path.suffix == ".md" and path not in reached]
    assert sorted(set(DOCUMENTS.glob("*.md")) - set(reached)) == []


def test_each_document_has_a_record() -> None:
    names = {path.name.removesuffix(".json.gz") for path in RECORDS.glob("*")}
    assert names and names == {path.stem.removeprefix("results-") for path in DOCUMENTS.glob("results-*.md")}


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_one_line() -> None:
    command = [sys.executable, "-m", "studies.record"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    line = "python -m studies.record measures a GPU, and there is none; --keep records an existing run\n"
    assert (run.returncode, run.stderr) == (4, line)
