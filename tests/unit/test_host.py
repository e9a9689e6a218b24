"""How much memory may still be taken: of the host, and of each cgroup above this process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dflash_trainer import host
from dflash_trainer.errors import CannotStart

GIB = 1 << 30


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cgroup of a unit in a slice, on a host with 8 GiB free; nothing is limited."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "cgroup").write_text("0::/dflash.slice/dflash-train@run1.service\n")
    folder = tmp_path / "cgroups/dflash.slice/dflash-train@run1.service"
    folder.mkdir(parents=True)
    for group in (folder, folder.parent):
        limit(group, "max", 3 * GIB, cached=GIB)
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroups")
    return folder


def limit(group: Path, maximum: object, used: int, cached: int) -> None:
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\n")


@pytest.mark.usefixtures("unit")
def test_without_limits_it_is_what_the_host_has() -> None:
    assert host.free_memory() == (8 * GIB, "MemAvailable of the host")


def test_the_units_limit_counts_what_is_used_but_not_what_is_cached(unit: Path) -> None:
    limit(unit, 4 * GIB, 3 * GIB, cached=GIB)
    assert host.free_memory() == (2 * GIB, "memory.max of dflash-train@run1.service")


def test_so_does_the_limit_of_a_slice_above(unit: Path) -> None:
    limit(unit, 6 * GIB, GIB, cached=0)
    limit(unit.parent, 3 * GIB, 3 * GIB, cached=0)
    assert host.free_memory() == (0, "memory.max of dflash.slice")


def test_cgroups_of_version_1_have_no_say(unit: Path) -> None:
    limit(unit, GIB, GIB, cached=0)
    host.CGROUP.write_text("1:name=systemd:/dflash.slice\n")
    assert host.free_memory()[0] == 8 * GIB


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from dflash_trainer.host import process_age; print(process_age())"
    )
    before = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < float(told) < time.monotonic() - before + 0.02  # the kernel counts in ticks


def test_the_cache_is_the_units_and_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/dflash/run1:/var/cache/other")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/a/.cache-of-a")
    assert host.cache_directory() == Path("/var/cache/dflash/run1")
    monkeypatch.delenv("CACHE_DIRECTORY")
    assert host.cache_directory() == Path("/home/a/.cache-of-a/dflash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/b")
    assert host.cache_directory() == Path("/home/b/.cache/dflash")


def given_gpus(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    """GPUs are leased to this process, and its torch, built for this CUDA, sees none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_gpus_that_torch_cannot_use_are_refused_with_cudas_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    given_gpus(monkeypatch, "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        CannotStart, match=r"cannot use GPU-1,GPU-2: The NVIDIA driver .* too old .*; update"
    ) as caught:
        host.choose_device()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(CannotStart, match=r"cannot use GPU-1,GPU-2: CUDA finds none; "):
        host.choose_device()


def test_a_torch_without_cuda_works_on_the_cpu_and_says_so_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given_gpus(monkeypatch, None)
    assert host.choose_device().type == "cpu"
    assert "built without CUDA: the CPU does the work, and GPU-1,GPU-2 none" in capfd.readouterr().err
    for none in ("", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if none is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert host.choose_device().type == "cpu"
        assert capfd.readouterr().err == ""
