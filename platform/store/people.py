"""Users and their tokens."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ...jobs.errors import Conflict, NotFound
from .database import Database
from .records import Role, User
from .tables import TokenRow, UserRow


class PeopleStore:
    """Users in a database. A token is shown once, when it is made; the database keeps its SHA-256."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, name: str, role: Role, now: float) -> User:
        """Add a user, or give the one that is there another role. Raises Conflict if nobody would be an admin then."""
        with self._db.write() as session:
            row = session.get(UserRow, name)
            if row is not None and row.role == Role.ADMIN.value != role.value and not _another_admin(session, name):
                raise Conflict(f"{name} is the only admin", hint="make somebody else an admin first")
            if row is None:
                row = UserRow(name=name, role=role.value, created_at=now)
                session.add(row)
            row.role = role.value
            return _user(row)

    def list(self) -> Sequence[User]:
        """All users, by name."""
        with self._db.read() as session:
            return [_user(row) for row in session.scalars(select(UserRow).order_by(UserRow.name))]

    def new_token(self, user: str, now: float, label: str = "") -> str:
        """A new token of the user. Raises NotFound."""
        token = secrets.token_urlsafe(32)
        self.accept_token(token, user, now, label)
        return token

    def accept_token(self, token: str, user: str, now: float, label: str = "") -> None:
        """Let ``token`` stand for the user from now on, unless it was revoked before. Raises NotFound."""
        with self._db.write() as session:
            if session.get(UserRow, user) is None:
                raise NotFound(f"there is no user {user}")
            if session.get(TokenRow, _digest(token)) is None:
                session.add(TokenRow(digest=_digest(token), user=user, label=label, created_at=now))

    def revoke_tokens(self, user: str, now: float) -> None:
        """No token that the user has works any more, nor ever again."""
        with self._db.write() as session:
            valid = (TokenRow.user == user, TokenRow.revoked_at.is_(None))
            session.execute(update(TokenRow).where(*valid).values(revoked_at=now))

    def who(self, token: str) -> User | None:
        """The user that the token stands for."""
        # Found by digest: how long that takes says nothing about tokens that exist.
        query = (
            select(UserRow)
            .join(TokenRow, TokenRow.user == UserRow.name)
            .where(TokenRow.digest == _digest(token), TokenRow.revoked_at.is_(None))
        )
        with self._db.read() as session:
            row = session.scalars(query).one_or_none()
            return _user(row) if row is not None else None


def _another_admin(session: Session, name: str) -> bool:
    query = select(UserRow.name).where(UserRow.role == Role.ADMIN.value, UserRow.name != name)
    return session.scalars(query.limit(1)).first() is not None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _user(row: UserRow) -> User:
    return User(row.name, Role(row.role), row.created_at)
