"""How a run ends, told to its directory and its tracker whatever happens."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import StorageError
from ..run_directory import RunDirectory, State
from ..tracking import NullTracker, Status, Tracker
from .result import Result

log = logging.getLogger(__name__)


@dataclass
class Ending:
    """What a run's end is told to, and of what."""

    tracker: Tracker
    result: Result = field(init=False)


@contextmanager
def telling_the_end(directory: RunDirectory, make_tracker: Callable[[], Tracker]) -> Iterator[Ending]:
    """Say in the directory and to the tracker how the block ended, whatever it raises; a full disk is a typed error."""
    ending = Ending(NullTracker())
    try:
        ending.tracker = make_tracker()
        yield ending
    except KeyboardInterrupt:
        _end(directory, ending.tracker, "stopped", "KILLED")
        raise
    except OSError as error:
        raised = _typed(error, directory)
        _end(directory, ending.tracker, "failed", "FAILED", str(raised))
        if raised is error:
            raise
        raise raised from error
    except BaseException as error:
        _end(directory, ending.tracker, "failed", "FAILED", str(error) or type(error).__name__)
        raise
    if ending.result.status == "done":
        _end(directory, ending.tracker, "done", "FINISHED")
    else:
        _end(directory, ending.tracker, "stopped", "KILLED")


def _end(directory: RunDirectory, tracker: Tracker, state: State, status: Status, error: str = "") -> None:
    for say in (lambda: directory.end(state, error), lambda: tracker.finish(status)):
        try:
            say()
        except OSError as failed:  # the disk is full or gone: what was raised before is the news
            log.warning("cannot write how the run in %s ended: %s", directory.path, failed)


def _typed(error: OSError, directory: RunDirectory) -> Exception:
    """What no part of a run has translated is of the run's own small files, or the disk is full or gone."""
    file = Path(str(error.filename)) if error.filename else None
    of_the_run = file is not None and file.absolute().is_relative_to(directory.path.absolute())
    if not of_the_run and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return error
    return StorageError(
        f"cannot write {file or directory.path}: {error.strerror}",
        tier="disk",
        hint="free some space or repair the disk, then start again: the run goes on from its last checkpoint",
    )
