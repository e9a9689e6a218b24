"""The containers that tests and demo boot: several at once are several machines."""

import os

import pytest
from container import Machine


def test_two_containers_at_once_have_cgroups_of_their_own(node: Machine, bare_node: Machine) -> None:
    """In one and the same, the end of the one would remove what the other has just made for a unit."""
    first, second = (cgroup_of_the_manager(machine) for machine in (node, bare_node))
    assert first
    assert first.isdisjoint(second)


def cgroup_of_the_manager(machine: Machine) -> set[str]:
    """Where a container's process 1 is, in each hierarchy that systemd makes groups in, seen from outside."""
    lines = (machine.root.parent / "cgroup").read_text().splitlines()
    return {line for line in lines if line.split(":")[1] in ("", "name=systemd")}


def test_tests_that_share_a_container_share_a_worker(node: Machine, request: pytest.FixtureRequest) -> None:
    """Marks that xdist does not see are of no use: each worker would boot a container of its own."""
    del node
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is one worker")
    assert request.node.nodeid.endswith("@node")
