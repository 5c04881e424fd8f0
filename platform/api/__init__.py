"""The REST API: what people and programs ask of the service. It changes no job itself."""

from .application import create_app
from .first_user import first_user
from .in_process import InProcess
from .origins import READS, Origins, Refusal

__all__ = ["READS", "InProcess", "Origins", "Refusal", "create_app", "first_user"]
