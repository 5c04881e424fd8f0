"""The user who started the service, and their token."""

from __future__ import annotations

import getpass
import re
import time

from ..artifacts import secret_file
from ..settings import Settings
from ..store import Role, Store, User


def first_user(store: Store, settings: Settings) -> User:
    """Make whoever runs the service its first admin, with the token in ``settings.api_token_path`` (mode 0600)."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", getpass.getuser()).strip("-._") or "admin"
    user = store.people.add(name, Role.ADMIN, time.time())
    store.people.accept_token(secret_file(settings.api_token_path), name, time.time(), "first")
    return user
