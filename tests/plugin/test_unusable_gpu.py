"""A GPU that PyTorch cannot use: one line says why, and nothing is measured on the CPU instead."""

import re
from pathlib import Path

import pytest
import torch

from perf import verify
from shardmark import calibrate
from shardmark.meter.hardware import hardware
from shardmark.ranks import gpus
from tests.support.project import project as project

pytest_plugins = ["pytester"]

CAUSES = {
    "old_driver": (
        "2.13.0+cu130",
        "13.0",
        RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nSearch for another"),
        "torch 2.13.0+cu130 is built for CUDA 13.0, NVIDIA's driver is 535.129.03, and PyTorch says: "
        "The NVIDIA driver on your system is too old (found version 12020).",
    ),
    "error_802": (
        "2.13.0+cu130",
        "13.0",
        RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
        "torch 2.13.0+cu130 is built for CUDA 13.0, NVIDIA's driver is 535.129.03, and PyTorch says: "
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    "wheel_for_cpu": (
        "2.13.0+cpu",
        None,
        AssertionError("Torch not compiled with CUDA enabled"),
        "torch 2.13.0+cpu is built without CUDA, NVIDIA's driver is 535.129.03, and PyTorch says: "
        "Torch not compiled with CUDA enabled",
    ),
}
"""torch's version, the CUDA that it is built for, what it raises, and the line."""


@pytest.fixture(params=CAUSES)
def says(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with an NVIDIA GPU and that cause; the line."""
    version, cuda, error, line = CAUSES[request.param]

    def init() -> None:
        raise error

    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "KERNEL_MODULE", module(tmp_path, "NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu"))
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    return line


def module(folder: Path, text: str) -> Path:
    """The file in which the driver's kernel module describes itself."""
    file = folder / "version"
    file.write_text(f"NVRM version: {text}\nGCC version:  gcc version 12.2.0 (Debian)\n")
    return file


def error_of(project: pytest.Pytester, *options: str) -> str:
    result = project.runpytest_inprocess("--collect-only", "-p", "no:cacheprovider", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR and not result.outlines
    (line,) = filter(None, result.errlines)
    return line


def test_auto_is_refused(says: str, project: pytest.Pytester) -> None:
    error = error_of(project, "--device=auto")
    assert error == f"ERROR: {refusal(says)}"


def refusal(says: str) -> str:
    hidden = "CUDA_VISIBLE_DEVICES= hides it, and then the CPU is measured"
    return f"torch cannot use this machine's GPU: {says}; {hidden}"


def test_no_other_command_takes_the_cpu_instead(
    says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=re.escape(refusal(says))):
        hardware("this")
    assert calibrate.main([str(tmp_path / "mine.toml")]) == calibrate.USAGE
    assert capsys.readouterr().err == f"{calibrate.COMMAND}: {refusal(says)}\n"
    assert calibrate.main([str(tmp_path / "mine.toml"), "--device=cuda"]) == calibrate.USAGE
    assert capsys.readouterr().err == f"{calibrate.COMMAND}: --device cuda: {says}\n"
    assert verify.main(["entry.py:make"]) == verify.USAGE
    assert capsys.readouterr().err == f"{verify.COMMAND}: {refusal(says)}\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides the GPU
    assert hardware("this").device == "cpu"


def test_cuda_says_why_there_is_none(says: str, project: pytest.Pytester) -> None:
    assert error_of(project, "--device=cuda", "--ranks=2").endswith(f"2 CUDA devices, and this machine has 0: {says}")


def test_the_cpu_is_measured_where_that_is_asked_for(
    says: str, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = ("--collect-only", "-q", "-p", "no:cacheprovider")
    assert project.runpytest_inprocess(*collect, "--device=cpu").ret == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides the GPU
    assert project.runpytest_inprocess(*collect, "--device=auto").ret == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024", "470.256.02"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)", "580.95.05"),
    ],
)
def test_the_driver_says_its_version(text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "KERNEL_MODULE", module(tmp_path, text))
    assert gpus.driver_version() == version


def test_nvidia_smi_is_asked_where_the_driver_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "KERNEL_MODULE", tmp_path / "none")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not gpus.has_device() and gpus.driver_version() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = --list-gpus ] && echo "GPU 0: NVIDIA" || echo 581.15')
    smi.chmod(0o755)
    assert gpus.has_device() and gpus.driver_version() == "581.15"
