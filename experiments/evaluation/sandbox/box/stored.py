"""Whether a program's folder on disk holds more than it may."""

from __future__ import annotations

import os
import stat

MOST_ENTRIES = 4096
"""Files, folders and links of one program; so many are looked through in about 10 ms."""
_FILLED_UNSEEN, _UNSEEN = stat.S_IWUSR | stat.S_IXUSR, stat.S_IRUSR


def holds_more(folder: str, most_bytes: int) -> bool:
    """Whether a folder has more than `most_bytes` in all its files, or more than `MOST_ENTRIES` entries.

    What lies in no folder any more but is still open is not seen. A folder whose owner may fill it but not list it,
    or one too deep to be named, counts as too much: what it holds cannot be told.
    """
    size = entries = 0
    left = [folder]
    while left:
        path = left.pop()
        try:
            with os.scandir(path) as found:
                for entry in found:
                    entries += 1
                    what = _look(entry)
                    if what is None:
                        continue
                    if stat.S_ISDIR(what.st_mode):
                        left.append(entry.path)
                    else:
                        size += what.st_size // max(1, what.st_nlink)
                    if size > most_bytes or entries > MOST_ENTRIES:
                        return True
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed meanwhile
        except PermissionError:
            if _fills_unseen(path):
                return True
        except OSError:
            return True
    return False


def _look(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # removed meanwhile


def _fills_unseen(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return mode & _FILLED_UNSEEN == _FILLED_UNSEEN and not mode & _UNSEEN
