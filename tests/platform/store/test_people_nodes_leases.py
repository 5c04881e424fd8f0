"""People, nodes, leases and the audit log, on both databases."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from lazytrain.jobs.errors import Conflict, NotFound
from lazytrain.platform.store import AuditEntry, Node, Role, Store


def node(name: str, **changes: object) -> Node:
    fields = {"address": "127.0.0.1", "kind": "H800", "device": "cuda", "cpus": 8.0, "gpus": 1.0, "alive": True}
    return Node(name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_a_token_stands_for_its_user_and_is_not_stored(store: Store) -> None:
    token = store.people.new_token("ada", 1.0)
    user = store.people.who(token)
    assert user is not None
    assert (user.name, user.role) == ("ada", Role.SUBMITTER)
    assert store.people.who(token + "x") is None
    with store._database.read() as session:
        assert token not in str(session.execute(text("SELECT * FROM tokens")).all())
    store.people.revoke_tokens("ada", 2.0)
    assert store.people.who(token) is None
    store.people.accept_token(token, "ada", 3.0)  # as at every start, while it is in a file
    assert store.people.who(token) is None


def test_somebody_is_an_admin(store: Store) -> None:
    store.people.add("root", Role.ADMIN, 1.0)
    with pytest.raises(Conflict, match="root is the only admin"):
        store.people.add("root", Role.VIEWER, 2.0)
    store.people.add("ada", Role.ADMIN, 3.0)
    assert store.people.add("root", Role.VIEWER, 4.0).role is Role.VIEWER


def test_a_token_of_nobody(store: Store) -> None:
    with pytest.raises(NotFound):
        store.people.new_token("nobody", 1.0)


def test_roles_are_ordered_and_can_change(store: Store) -> None:
    assert Role.ADMIN.includes(Role.SUBMITTER)
    assert not Role.VIEWER.includes(Role.SUBMITTER)
    store.people.add("ada", Role.ADMIN, 2.0)
    assert [(user.name, user.role) for user in store.people.list()] == [("ada", Role.ADMIN)]


def test_nodes_come_and_go(store: Store) -> None:
    assert store.nodes.see([node("a"), node("b")], 1.0) == []
    store.nodes.set_profile("a", {"kind": "H800"})
    assert store.nodes.see([node("a")], 2.0) == ["b"]
    assert store.nodes.see([node("a")], 3.0) == []
    assert store.nodes.see([node("a")], 9.0) == []
    assert [(n.name, n.alive, n.seen_at) for n in store.nodes.list()] == [("a", True, 9.0), ("b", False, 1.0)]
    assert store.nodes.get("a").profile == {"kind": "H800"}


def test_a_node_with_other_hardware_is_measured_again(store: Store) -> None:
    store.nodes.see([node("a")], 1.0)
    store.nodes.set_profile("a", {"kind": "H800"})
    store.nodes.see([node("a", gpus=2.0)], 2.0)
    assert store.nodes.get("a").profile == {}


def test_drained_nodes_and_faults(store: Store) -> None:
    store.nodes.see([node("a")], 1.0)
    store.nodes.drain("a", True, "disk is being replaced")
    assert [store.nodes.add_fault("a"), store.nodes.add_fault("a")] == [1, 2]
    store.nodes.see([node("a")], 2.0)
    kept = store.nodes.get("a")
    assert (kept.drained, kept.reason, kept.faults) == (True, "disk is being replaced", 2)
    store.nodes.drain("a", False)
    assert (store.nodes.get("a").drained, store.nodes.get("a").faults) == (False, 0)
    with pytest.raises(NotFound):
        store.nodes.drain("b", True)


def test_one_leader_until_its_lease_runs_out(store: Store) -> None:
    first = store.leases.take("controller", "one", 0.0, 10.0)
    assert first is not None
    assert store.leases.take("controller", "two", 9.0, 10.0) is None
    renewed = store.leases.take("controller", "one", 9.0, 10.0)
    assert renewed is not None
    assert (renewed.epoch, renewed.expires_at) == (first.epoch, 19.0)
    assert store.leases.take("controller", "two", 18.0, 10.0) is None
    second = store.leases.take("controller", "two", 19.0, 10.0)
    assert second is not None
    assert second.epoch == first.epoch + 1
    assert store.leases.holder("controller", 20.0) == second
    store.leases.give_back(first)  # it is not the first one's any more
    assert store.leases.holder("controller", 20.0) == second
    store.leases.give_back(second)
    assert store.leases.holder("controller", 20.0) is None


def test_a_silent_owner_loses_the_lease_whenever_it_ends(store: Store) -> None:
    first = store.leases.take("controller", "one", 1e9, 10.0)
    assert store.leases.take("controller", "two", 0.0, 10.0, silent=None) is None
    renewed = store.leases.take("controller", "one", 1e9 + 3, 10.0)
    assert store.leases.take("controller", "two", 0.0, 10.0, silent=first) is None  # it has been heard of since
    second = store.leases.take("controller", "two", 0.0, 10.0, silent=renewed)
    assert second is not None and renewed is not None
    assert (second.epoch, second.expires_at) == (renewed.epoch + 1, 10.0)


def test_many_ask_for_a_new_lease_at_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda i: store.leases.take("controller", f"c{i}", 0.0, 10.0), range(8)))
    assert len([lease for lease in taken if lease is not None]) == 1


def test_the_audit_log_is_newest_first(store: Store) -> None:
    for at in range(3):
        store.audit.add(AuditEntry(float(at), "ada", "127.0.0.1", "POST", "/api/v1/jobs", 201))
    assert [entry.time for entry in store.audit.list(limit=2)] == [2.0, 1.0]
