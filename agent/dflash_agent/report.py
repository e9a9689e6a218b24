"""What `dflashctl check` shows: the GPUs, who holds them, and what is wrong with them."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict

from dflash_agent.findings import Finding
from dflash_agent.gpus import Gpu
from dflash_agent.verdict import Snapshot, dirt, driver_missing, judge_in_use
from dflash_agent.words import size

RED, YELLOW, GREEN, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
_COLOURS = {"ok": GREEN, "warn": YELLOW, "refuse": RED}


def node_findings(snapshot: Snapshot) -> list[Finding]:
    """Everything that is to be said of the node's GPUs."""
    if snapshot.reading.problem:
        if snapshot.hardware:
            return [driver_missing(snapshot.reading)]
        return [Finding("gpu", "ok", "no NVIDIA GPU in this machine: runs train on the CPU")]
    return [finding for gpu in snapshot.reading.gpus for finding in judge_in_use(snapshot, gpu)]


def table(snapshot: Snapshot, findings: Iterable[Finding], colour: bool) -> str:
    """The GPUs, a line each with its holders below, then the findings."""
    lines = []
    if snapshot.reading.gpus:
        lines += _gpu_lines(snapshot)
        lines.append("")
    for finding in findings:
        text = finding.line()
        lines.append(f"{_COLOURS[finding.severity]}{text}{PLAIN}" if colour else text)
    if snapshot.unseen:
        hint = "" if os.geteuid() == 0 else "; to see all: sudo dflashctl check"
        lines.append(f"{snapshot.unseen} processes could not be looked into{hint}")
    return "\n".join(lines)


def _gpu_lines(snapshot: Snapshot) -> list[str]:
    head = ("GPU", "BUS", "NAME", "TOTAL", "USED", "HELD", "LOAD", "LEASED BY")
    rows = [head, *(_cells(snapshot, gpu) for gpu in snapshot.reading.gpus)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row, gpu in zip(rows, [None, *snapshot.reading.gpus], strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if gpu is None:
            continue
        opened = {holder.pid for holder, _ in dirt(snapshot, gpu)[1]}
        for holder in snapshot.holders:
            for use in holder.uses:
                shown = use.kind != "open" or holder.pid in opened or holder.housekeeper
                if use.uuid == gpu.uuid and shown:
                    amount = size(use.bytes) if use.bytes is not None else "?" if use.kind != "open" else "-"
                    role = "house-keeper" if holder.housekeeper else use.kind
                    lines.append(f"     {amount:>10}  {role:12}  {holder.line()}")
    return lines


def _cells(snapshot: Snapshot, gpu: Gpu) -> tuple[str, ...]:
    def amount(count: int | None) -> str:
        return "?" if count is None else size(count)

    lease = snapshot.leases.get(gpu.uuid)
    return (
        str(gpu.index),
        gpu.bus_id or "?",
        gpu.name or "?",
        amount(gpu.total),
        amount(gpu.used),
        amount(gpu.held),
        "?" if gpu.utilization is None else f"{gpu.utilization} %",
        (lease.unit or "?") if lease else "-",
    )


def as_json(snapshot: Snapshot, findings: Iterable[Finding]) -> str:
    """The same for programs: driver, gpus, holders, leases, xids, findings, and processes not looked into."""
    values = {
        "driver": snapshot.reading.driver,
        "problem": snapshot.reading.problem,
        "gpus": [asdict(gpu) | {"held": gpu.held} for gpu in snapshot.reading.gpus],
        "holders": [asdict(holder) for holder in snapshot.holders],
        "leases": {uuid: asdict(lease) for uuid, lease in snapshot.leases.items()},
        "xids": [asdict(xid) for xid in snapshot.xids],
        "unseen": snapshot.unseen,
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(values, indent=2)
