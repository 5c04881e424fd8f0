"""Another policy for a run that is under way: left as a file in its directory, taken up between two steps."""

from __future__ import annotations

import logging

from ..errors import LazytrainError
from ..executor import Streamed
from ..policy import Policy
from ..run_directory import RunDirectory, write_atomically

log = logging.getLogger(__name__)


def switch_if_told(streamed: Streamed, directory: RunDirectory) -> Policy | None:
    """The policy that `RunDirectory.next_policy` holds, carried out from now on and written to ``directory.policy``.

    None where there is no such file, or where the policy cannot follow the one that runs: that goes on then.
    """
    path = directory.next_policy
    if not path.exists():
        return None
    try:
        policy = Policy.load(path)
        streamed.switch(policy)
    except LazytrainError as error:
        log.warning("%s was not taken up, the run goes on as before: %s", path.name, error.message)
        return None
    finally:
        path.unlink()
    write_atomically(directory.policy, policy.to_json())
    log.info("goes on with another policy: %s", policy.count_homes())
    return policy
