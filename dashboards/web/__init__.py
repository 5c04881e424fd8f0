"""What all pages stand on: sessions, cached reads, rendering, and the rules that every request passes."""

from .door import Door
from .reading import Reads
from .rendering import renderer
from .sessions import Session, Sessions
from .visit import State, Visit, open_page, page

__all__ = ["Door", "Reads", "Session", "Sessions", "State", "Visit", "open_page", "page", "renderer"]
