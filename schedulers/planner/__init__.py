"""Decides policies: `plan` answers a question, `paper` is the solver behind it, `instance` what the solver sees."""

from .answer import Change, Plan, Reason, Solver
from .instance import Instance, Link, Price, make_instance, price
from .paper import Solution, least_bytes, solve
from .plan import beside_rules, fits, plan

__all__ = [
    "Change",
    "Instance",
    "Link",
    "Plan",
    "Price",
    "Reason",
    "Solution",
    "Solver",
    "beside_rules",
    "fits",
    "least_bytes",
    "make_instance",
    "plan",
    "price",
    "solve",
]
