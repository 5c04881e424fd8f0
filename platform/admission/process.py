"""The process that plans: one order a line on standard input, one answer a line on standard output.

    {"job": "j-1", "admission": {...}}    or    {"job": "j-1", "error": {"code", "message", "hint", "field"}}

An order with the key ``kind`` is a `Question`, whose answer has ``values`` in place of ``admission``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

from ...jobs.errors import LazytrainError
from ..logs import quiet_libraries
from ..settings import Settings
from .measuring import measuring_of
from .plan_job import plan_job
from .questions import QUESTIONS
from .values import AdmissionOrder


def main() -> None:
    """Answer orders until standard input is closed."""
    quiet_libraries()
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        _answer(answers, json.loads(line))


def _answer(answers: TextIO, fields: dict[str, Any]) -> None:
    answer: dict[str, Any] = {"job": fields["job"]}
    try:
        measuring = measuring_of(Settings.read())
        if "kind" in fields:
            answer["values"] = QUESTIONS[fields["kind"]](fields["values"], measuring)
        else:
            answer["admission"] = plan_job(AdmissionOrder(**fields), measuring).model_dump(mode="json")
    except LazytrainError as error:
        answer["error"] = error.to_dict()
    except Exception as error:  # one job that cannot be planned must not keep the others from it
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        message = f"planning failed: {type(error).__name__}: {first}"
        answer["error"] = LazytrainError(message, hint="the trace is in the log of the planning process").to_dict()
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
