"""What the service remembers, in SQLite or PostgreSQL: jobs, events, nodes, people, who leads."""

from .jobs import Move, Stale
from .records import Action, AuditEntry, Change, Event, Job, Lease, NewJob, Node, Request, Role, User
from .store import Store

__all__ = [
    "Action",
    "AuditEntry",
    "Change",
    "Event",
    "Job",
    "Lease",
    "Move",
    "NewJob",
    "Node",
    "Request",
    "Role",
    "Stale",
    "Store",
    "User",
]
