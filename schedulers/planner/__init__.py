"""Decides policies: `plan` answers a question, `paper` is the solver behind it, `instance` what the solver sees."""

from .answer import Plan, Reason, Solver
from .instance import Instance, Link, Price, make_instance, price
from .paper import Solution, least_bytes, solve
from .plan import plan

__all__ = [
    "Instance",
    "Link",
    "Plan",
    "Price",
    "Reason",
    "Solution",
    "Solver",
    "least_bytes",
    "make_instance",
    "plan",
    "price",
    "solve",
]
