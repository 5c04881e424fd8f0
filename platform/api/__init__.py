"""The REST API: what people and programs ask of the service. It changes no job itself."""

from .application import create_app
from .first_user import first_user

__all__ = ["create_app", "first_user"]
