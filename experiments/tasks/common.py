"""What several tasks read: actions in tags, and files of instances."""

from __future__ import annotations

from pathlib import Path

from racelab.experiments.data.files import Record, read_jsonl
from racelab.experiments.errors import DataError

ACTION_END = "</action>"
"""The string that ends a reply with an action."""
_ACTION_START = "<action>"


def tagged_actions(reply: str) -> list[str]:
    """What stands between `<action>` and the next `</action>`, stripped, in order; tags without an end are left out."""
    found, at = [], 0
    while (start := reply.find(_ACTION_START, at)) >= 0:
        start += len(_ACTION_START)
        end = reply.find(ACTION_END, start)
        if end < 0:
            break
        found.append(reply[start:end].strip())
        at = end + len(ACTION_END)
    return found


def read_instances(path: str, key: str) -> list[Record]:
    """The objects of a .jsonl file, each with the `file:line` where it stands.

    Args:
        path: of the file; `~` is the home folder.
        key: that names it in the config, for messages.

    Raises:
        DataError: another ending, no such file, unreadable, malformed or empty.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() != ".jsonl":
        raise DataError(f"{file}: not a .jsonl file; set {key} to one")
    if not file.exists():
        raise DataError(f"{file}: no such file; set {key} to a file that exists")
    records = list(read_jsonl(file))
    if not records:
        raise DataError(f"{file}: empty; set {key} to a file with one JSON object a line")
    return records
