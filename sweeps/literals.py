"""Values of a grid file as words of the command line, so that each reaches the config as what it is in the file."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import yaml

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./@+-][A-Za-z0-9_./:@%+-]*")


def as_word(key: str, value: Any) -> str:
    """`key=value` as on the command line. Text that could be misread there is quoted."""
    return f"{key}={literal(value)}"


def literal(value: Any) -> str:
    """The value as in a word of the command line."""
    if isinstance(value, list):
        return f"[{','.join(literal(item) for item in value)}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and _is_text(value)):
        # in a quoted text a backslash is itself, but for those before a quote
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
        return f"'{escaped}'"
    return str(value)


def _is_text(value: str) -> bool:
    """Whether neither YAML nor the command line takes it for a number, a truth value, a date or null."""
    import yaml

    reader: Any = yaml.SafeLoader("")
    tag = reader.resolve(yaml.ScalarNode, value.lower(), (True, False))
    try:
        float(value)
    except ValueError:
        return bool(tag == "tag:yaml.org,2002:str")
    return False


@functools.cache
def loader() -> type[yaml.SafeLoader]:
    """YAML as the config files have it: `1e-4` is a number there, which YAML 1.1 takes for a text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return Loader
