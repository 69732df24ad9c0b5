"""One family of errors. Each message is one line: what is wrong, where (file, key or line), and the mend."""

from __future__ import annotations


class RacelabError(Exception):
    """Base of every error that racelab raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(RacelabError):
    """A config key, value or combination that cannot work."""

    exit_code = 2


class DataError(RacelabError):
    """A data file that is missing, malformed or empty."""

    exit_code = 2


class ModelError(RacelabError):
    """A model folder that is missing, incomplete or whose hash is not the expected one."""

    exit_code = 2


class RunFolderError(RacelabError):
    """A run folder that cannot be used: unknown, ambiguous, of another schema, or in use by another process."""

    exit_code = 2


class InUseError(RunFolderError):
    """A lock that another process held for as long as it was waited for; the folder itself can be written.

    Who may go on without the lock catches this, and does not ask afterwards whether it is held: by then it may be free.
    """


class DiskError(RunFolderError):
    """A file of a run that found no room: disk or quota full, or larger than the process may write."""

    exit_code = 1


class FencedError(RacelabError):
    """This process was replaced by another that works on the run; it may write nothing more (see `fence.py`).

    No RunFolderError: what makes do with a folder that cannot be written must not make do with this.
    """

    exit_code = 1


class CheckpointError(RacelabError):
    """A checkpoint that cannot be written (no space) or read (checksum, other config)."""

    exit_code = 1


class UnreachableError(RacelabError):
    """A backend or server that does not answer."""

    exit_code = 4


class MissingDependencyError(ConfigError):
    """An optional package is not installed; the message gives the command that installs it."""
