"""Xid errors: from the kernel's lines, and from what the agent has kept."""

import json
from pathlib import Path

import pytest
from dflash_agent import xids
from dflash_agent.xids import Xid, parse_kernel_line, recent, record


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "4,1234,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=41, GPU has fallen off the bus.",
            ("0000:3b:00", 79),
        ),
        ("3,1,5000000,-;NVRM: Xid (PCI:0000:3B:00.0): 13, Graphics Exception", ("0000:3b:00", 13)),
        ("4,9,5000000,-,caller=T1;NVRM: Xid (PCI:0001:00:00): 48", ("0001:00:00", 48)),
    ],
)
def test_a_kernel_line_is_understood(line: str, expected: tuple[str, int]) -> None:
    assert parse_kernel_line(line, boot=100.0) == Xid(*expected, time=105.0)


@pytest.mark.parametrize("line", ["", "4,1,2,-;NVRM: loading", "6,1,2,-;usb 1-1: Xid (PCI", "garbage"])
def test_other_lines_are_not(line: str) -> None:
    assert parse_kernel_line(line, boot=0.0) is None


def test_the_latest_of_each_kind_and_gpu_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xids, "KERNEL_LOG", tmp_path / "kmsg")
    (tmp_path / "kmsg").write_text("")
    monkeypatch.setattr(xids, "SEEN_FILE", tmp_path / "seen" / "xids.jsonl")
    assert recent() == ()
    for when in (1.0, 3.0, 2.0):
        record(Xid("0000:3b:00", 79, when), xids.SEEN_FILE)
    record(Xid("0000:3b:00", 13, 0.5), xids.SEEN_FILE)
    assert recent() == (Xid("0000:3b:00", 13, 0.5), Xid("0000:3b:00", 79, 3.0))


def test_a_torn_record_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xids, "KERNEL_LOG", tmp_path / "none")
    monkeypatch.setattr(xids, "SEEN_FILE", tmp_path / "xids.jsonl")
    good = json.dumps({"bus_id": "0000:3b:00", "code": 48, "time": 1.0})
    (tmp_path / "xids.jsonl").write_text(f'{{"bus_id"\n{good}\n[]\n{{"x": 1}}\n')
    assert recent() == (Xid("0000:3b:00", 48, 1.0),)


def test_what_is_kept_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xids, "KEPT_LINES", 5)
    for i in range(9):
        record(Xid("0000:3b:00", i, float(i)), tmp_path / "xids.jsonl")
    assert len((tmp_path / "xids.jsonl").read_text().splitlines()) == 6
    assert (tmp_path / "xids.jsonl").stat().st_mode & 0o777 == 0o644


def test_every_fatal_error_has_a_meaning_and_none_is_an_applications() -> None:
    assert set(xids.MEANING) >= xids.FATAL
    assert not xids.FATAL & xids.OF_APPLICATIONS
