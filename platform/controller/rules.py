"""The lab's rules of sharing, from a YAML file.

min_run_s: 30m                      no preemption or move before this; durations or seconds
preempt_margin: 20                  points of priority that make one job leave for another
ageing_s: 6h
reserve_after_s: 24h
reserve_part: 0.25
moving: true                        start on a slower GPU that is idle, move to a faster one later
shares: {ada: 2}                    weight of a user, 1 where it is not given
quota: {"*": {H800: 2}}             most GPUs of a kind at once, by user; "*" is everybody else
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...jobs.errors import InputError
from ...jobs.spec import read_yaml
from ...jobs.units import Duration
from ...schedulers.placement import Rules

_Count = Annotated[int, Field(ge=0)]


class RulesFile(BaseModel):
    """What the file may hold; what it does not say stays as `Rules` has it."""

    model_config = ConfigDict(extra="forbid")

    min_run_s: Duration | None = None
    preempt_margin: _Count | None = None
    ageing_s: Duration | None = None
    reserve_after_s: Duration | None = None
    reserve_part: Annotated[float, Field(gt=0, le=1)] | None = None
    moving: bool | None = None
    shares: dict[str, float] | None = None
    quota: dict[str, dict[str, _Count]] | None = None
    utc_offset_s: float | None = None


def load_rules(path: Path, default: Rules) -> Rules:
    """``default`` with what the file says. Raises InputError for what is no such file."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8")) or {}
        found = RulesFile.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the rules in {path} cannot be read: {error}", hint="set LAZYTRAIN_RULES") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where or 'the file'}: {first['msg']}", hint="see LAZYTRAIN_RULES") from None
    return replace(default, **found.model_dump(exclude_none=True))
