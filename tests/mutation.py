"""Mutation testing of the maths: changes one operator or number at a time and expects a test to fail.

Run: python tests/mutation.py [--jobs 2] [file ...]     (from the repository root; about ten minutes)

Each mutant lives in a forked child that already holds numpy, torch, pytest and hypothesis; the mutated module is put
in place of the file by an import hook, so nothing on disk changes. The file's own tests run first, the
invariants only if those let the mutant live. Exit status 1 if a mutant survives that `EQUIVALENT` does not
explain, or if a file's tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = "experiments/methods/"
TESTS = "tests/experiments/"
INVARIANTS = TESTS + "test_race_invariants.py"
TARGETS = {
    METHODS + "grpo.py": TESTS + "test_grpo.py",
    METHODS + "race/routing.py": TESTS + "test_routing.py",
    METHODS + "race/pool.py": TESTS + "test_pool.py",
    METHODS + "race/phase.py": TESTS + "test_phase.py",
    METHODS + "race/rubric_reward.py": TESTS + "test_rubric_reward.py",
    METHODS + "race/controllers.py": TESTS + "test_controllers.py",
    METHODS + "ledger.py": TESTS + "test_ledger.py",
    METHODS + "baselines/evolm_reward.py": TESTS + "test_evolm.py",
    METHODS + "baselines/rlcer_reward.py": TESTS + "test_rlcer.py",
    METHODS + "baselines/rubric_arm_reward.py": TESTS + "test_rubric_arm.py",
    METHODS + "baselines/rrd_weights.py": TESTS + "test_rrd.py",
    METHODS + "rlds/turns.py": TESTS + "test_rlds_turns.py",
    METHODS + "rlds/rows.py": TESTS + "test_rlds_sdae.py",
    METHODS + "rlds/sdae.py": TESTS + "test_rlds_sdae.py",
    METHODS + "rlds/diagnostics.py": TESTS + "test_rlds_diagnostics.py",
    METHODS + "rlds/auxiliary.py": TESTS + "test_rlds_auxiliary.py",
    METHODS + "rlds/phi.py": TESTS + "test_rlds_phi.py",
}
_ANY_ROUNDING = "one decimal more or less still lies between the grid of the scores and their binary error"
_SAME_LENGTH = "the lengths were made equal a few lines above, `strict` can never act"
_IN_RANGE = "the share lies in [0, 1] but for rounding"
_BLOCK_SIZE = "only how many rows are looked up at a time"
_NO_TOKENS = "a row without tokens: its kernel is 0 whatever the divisor or the shift"
_NONE = "any turn below 0 is no pivot and masks nothing"
_BOUNDARY = "floats do not meet the threshold exactly"
_ONE_COLUMN = "the array has one column, the first is the last"

EQUIVALENT: dict[tuple[str, str], str] = {
    (METHODS + "grpo.py", "SCORE_DIGITS = 12 => 12 +1"): _ANY_ROUNDING,
    (METHODS + "grpo.py", "SCORE_DIGITS = 12 => 12 -1"): _ANY_ROUNDING,
    (
        METHODS + "grpo.py",
        "for (prefix, samples, rewards_G), weights_GT in zip(groups, weights, strict=True): => True to False",
    ): _SAME_LENGTH,
    (
        METHODS + "grpo.py",
        "rows = zip(samples, adv_G, weights_GT, strict=True) => True to False",
    ): _SAME_LENGTH,
    (METHODS + "baselines/evolm_reward.py", "size = np.clip(margins, 0.0, 1.0) => 1.0 +1"): (
        "scores lie in [0, 1], so no margin is above 1"
    ),
    **{
        (METHODS + "baselines/rrd_weights.py", label): why
        for label, why in {
            "FLOOR = 1e-8 => 1e-08 -1": "the ridge keeps every eigenvalue above 0.1",
            "if n == 0: => 0 -1": "no items: what follows gives the same empty weights",
            "largest = positive_I.max(initial=0.0) => 0.0 -1": "no weight is below 0 there, and 0 is treated alike",
        }.items()
    },
    **{
        (METHODS + "baselines/rlcer_reward.py", label): why
        for label, why in {
            "return min(max((got - lowest) / whole, 0.0), 1.0) => 1.0 +1": _IN_RANGE,
            "return min(max((got - lowest) / whole, 0.0), 1.0) => 0.0 -1": _IN_RANGE,
            "lowest = math.fsum(s for s in points if s < 0.0) => Lt to LtE": "no item has 0 points",
            "points = [float(s) for s, counts in zip(points_K, valid_K, strict=True) if counts] => True to False": (
                _SAME_LENGTH
            ),
            "got = math.fsum(s for s, b in zip(points, np.asarray(holds_K)[valid_K], strict=True) if b) => "
            "True to False": _SAME_LENGTH,
        }.items()
    },
    **{
        (METHODS + "baselines/rubric_arm_reward.py", label): why
        for label, why in {
            "used: int = 0 => 0 +1": "not read before the first epoch",
            "used: int = 0 => 0 -1": "not read before the first epoch",
            "@dataclass(frozen=True, slots=True) => True to False": "nobody writes to it",
            "for winner, valid, beyond in zip(winners_G, valid_G, beyond_G, strict=True) => True to False": (
                _SAME_LENGTH
            ),
            "now = PairOrder(int(rng.integers(2**62)), 0) => 62 +1": "any seed will do",
            "now = PairOrder(int(rng.integers(2**62)), 0) => 62 -1": "any seed will do",
        }.items()
    },
    **{
        (METHODS + "rlds/turns.py", label): why
        for label, why in {
            "_BLOCK = 1 << 17 => 1 +1": _BLOCK_SIZE,
            "_BLOCK = 1 << 17 => 1 -1": _BLOCK_SIZE,
            "_BLOCK = 1 << 17 => 17 +1": _BLOCK_SIZE,
            "_BLOCK = 1 << 17 => 17 -1": _BLOCK_SIZE,
            "rows = max(1, _BLOCK // max(t, 1)) => 1 +1": _BLOCK_SIZE,
            "start_N = xp.arange(min(rows, n), dtype=xp.int64, device=turn_of_token_NT.device) * (1 + width) + 1 => "
            "min to max": "more row starts than a block uses",
            "clamped_NK = xp.where(pivots_NK < 0, like(-1, pivots_NK), xp.minimum(pivots_NK, last_N1)) => 0 -1": _NONE,
            "some_NK1 = xp.where(nearest_NK1 > -np.inf, nearest_NK1, like(0.0, counts_NU)) => 0.0 +1": _NO_TOKENS,
            "some_NK1 = xp.where(nearest_NK1 > -np.inf, nearest_NK1, like(0.0, counts_NU)) => 0.0 -1": _NO_TOKENS,
            "scaled_NKU = shape_NKU * (tokens_N11 / xp.where(total_NK1 > 0, total_NK1, like(1.0, counts_NU))) "
            "=> 0 +1": ("the nearest turn counts at least 1, and 1 is what replaces it"),
            "scaled_NKU = shape_NKU * (tokens_N11 / xp.where(total_NK1 > 0, total_NK1, like(1.0, counts_NU))) "
            "=> 1.0 +1": (_NO_TOKENS),
            "first[parent] = min(f for f, p in zip(first, parent_N, strict=True) if int(p) == parent) => "
            "True to False": (_SAME_LENGTH),
            "kept = [kept_turns(c, f) for c, f in zip(counts, train_from, strict=True)] => True to False": (
                "the next zip refuses the same"
            ),
            "per_row = [(c * k).sum(1) for c, k in zip(counts, kept, strict=True)] => True to False": _SAME_LENGTH,
            "for k, n_N in zip(kept, per_row, strict=True) => True to False": _SAME_LENGTH,
            "k / (namespace(n_N).where(n_N > 0, n_N, like(1.0, n_N))[:, None] * rows) => 0 +1": (
                "1 token is replaced by 1"
            ),
            "k / (namespace(n_N).where(n_N > 0, n_N, like(1.0, n_N))[:, None] * rows) => 1.0 +1": (
                "a row without trained tokens has weight 0 whatever the divisor"
            ),
        }.items()
    },
    **{
        (METHODS + "rlds/rows.py", label): why
        for label, why in {
            "if abs(float(out.phi_K.sum()) - 1.0) > 1e-6 or bool((out.phi_K < 0).any()): => Gt to GtE": _BOUNDARY,
            "grades_NK=full(rows.grades_NK, 1, (n, k), xp.int64), => 1 +1": "grades of ungraded rows are not looked at",
            "grades_NK=full(rows.grades_NK, 1, (n, k), xp.int64), => 1 -1": "grades of ungraded rows are not looked at",
            "train_from_N=full(rows.train_from_N, 0, (n,), xp.int64), => 0 -1": _NONE,
            "pivots_NK=full(rows.pivots_NK, -1, (n, k), xp.int64), => 1 +1": _NONE,
        }.items()
    },
    **{
        (METHODS + "rlds/sdae.py", label): why
        for label, why in {
            "return (highest_M - lowest_M <= FLAT)[index_N] => LtE to Lt": _BOUNDARY,
            "amplified_N = rows.is_retry_N & (adv_N > 0) => Gt to GtE": "0 times any factor is 0",
            "even_N = ~graded_N | (rewards_N < 0) | (total_N == 0) => Lt to LtE": "any share of a reward of 0 is 0",
            "some_N = group_mean(like(graded_N, rewards_N)[:, None], rows.group_N)[:, 0] > 0 => 0 -1": _ONE_COLUMN,
            "[stage2(a_NK, p.phi_K)[on_N] for p, (a_NK, on_N, _) in zip(parts, stage, strict=True)] => True to False": (
                _SAME_LENGTH
            ),
            "return tuple(_apply(rows, *done, sigma, settings) for rows, done in zip(parts, stage, strict=True)) => "
            "True to False": _SAME_LENGTH,
        }.items()
    },
    **{
        (METHODS + "rlds/diagnostics.py", label): why
        for label, why in {
            "if not len(x_N) or np.std(x_N) <= TINY or np.std(y_N) <= TINY: => LtE to Lt": _BOUNDARY,
            "return bool(np.ptp(phi_K) > TINY) => Gt to GtE": _BOUNDARY,
            "return np.asarray((adv_NK > TINY).any(1) & (adv_NK < -TINY).any(1)) => Gt to GtE": _BOUNDARY,
            "return np.asarray((adv_NK > TINY).any(1) & (adv_NK < -TINY).any(1)) => Lt to LtE": _BOUNDARY,
            "as_far = np.abs(drawn_B - centre) >= abs(value - centre) - TIE => GtE to Gt": _BOUNDARY,
            "return float(np.clip(x_N @ y_N / np.sqrt((x_N @ x_N) * (y_N @ y_N)), -1.0, 1.0)) => 1.0 +1": (
                "only rounding leaves [-1, 1]"
            ),
            "for rows, adv in zip(parts, done, strict=True): => True to False": _SAME_LENGTH,
            "_stages([permuted(p, at, rng) for p, at in zip(whole, positions, strict=True)], settings) => "
            "True to False": (_SAME_LENGTH),
            "parents = np.full(len(rows.rewards_N), -1) if parent_N is None else parent_N => 1 +1": (
                "any row below 0 is no parent"
            ),
            "return np.asarray(np.maximum(last_turn(rows.counts_NU)[:, None] + 1.0, 1.0)) => 1.0 -1": (
                "a row without tokens: a pivot that comes to it is turn 0, and then none"
            ),
            "centred_N = rows.rewards_N - group_mean(rows.rewards_N[:, None], rows.group_N)[:, 0] => 0 -1": _ONE_COLUMN,
            "return np.asarray(np.sqrt((weight_NU * (adv_NU - mean_N1) ** 2).sum(1) / total_N1[:, 0])) => 0 -1": (
                _ONE_COLUMN
            ),
            "groups.append(group_mean(mixed_N[:, None].astype(float), rows.group_N)[first, 0] > 0) => 0 -1": (
                _ONE_COLUMN
            ),
        }.items()
    },
}
"""(file, mutation) -> why no test can tell it from the original. The mutation is `source line => change`."""

TIMEOUT_S = 90.0

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "minimum": "maximum"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed program."""

    path: str
    line: int
    label: str
    code: types.CodeType


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(description, mutated copy of the node)."""
    for attribute in ("op", "ops"):
        held = getattr(node, attribute, None)
        for i, operator in enumerate(held if isinstance(held, list) else [held] if held else []):
            for other in OPERATORS.get(type(operator), ()):
                new = copy.deepcopy(node)
                if isinstance(held, list):
                    getattr(new, attribute)[i] = other()
                else:
                    setattr(new, attribute, other())
                yield f"{type(operator).__name__} to {other.__name__}", new
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield f"{type(node.op).__name__} dropped", copy.deepcopy(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} to {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        for change in (1, -1):
            yield f"{node.value} {change:+d}", ast.Constant(node.value + change)
    if isinstance(node, (ast.If, ast.IfExp)):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "condition negated", new
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield f"{node.id} to {NAMES[node.id]}", ast.Name(NAMES[node.id], node.ctx)
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f".{node.attr} to .{NAMES[node.attr]}", ast.Attribute(node.value, NAMES[node.attr], node.ctx)


class _Swap(ast.NodeTransformer):
    """Puts `new` where `target` is, in place."""

    def __init__(self, target: ast.AST, new: ast.AST) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Depth first."""
        if node is self.target:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def unchanged(path: str) -> Mutant:
    """The file as it is; if its tests fail on that, they would seem to kill every mutant."""
    return Mutant(path, 0, "unchanged", compile((ROOT / path).read_text(), str(ROOT / path), "exec"))


def mutants(path: str) -> Iterator[Mutant]:
    """All mutants of a file. One tree is changed, compiled and changed back."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    for target in list(ast.walk(tree)):
        for description, new in list(_replacements(target)):
            _Swap(target, new).visit(tree)
            code = compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec")
            _Swap(new, target).visit(tree)
            line = getattr(target, "lineno", 0)
            yield Mutant(path, line, f"{lines[line - 1].strip()} => {description}", code)


class _Loader(importlib.abc.Loader, importlib.abc.MetaPathFinder):
    """Gives the mutated code under the module's own name."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = "racelab." + mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answers for the one module."""
        return importlib.machinery.ModuleSpec(name, self) if name == self.name else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the mutant."""
        module.__file__ = str(ROOT / self.mutant.path)
        exec(self.mutant.code, module.__dict__)


def _child(mutant: Mutant) -> int:
    """0 if all tests pass (the mutant lives), else 1. Runs in a forked process."""
    import pytest

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.meta_path.insert(0, _Loader(mutant))
    for tests in (TARGETS[mutant.path], INVARIANTS):
        if pytest.main(["-x", "-q", "-p", "no:cacheprovider", str(ROOT / tests)]):
            return 1
    return 0


def _start(mutant: Mutant) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _child(mutant)
        finally:
            os._exit(status)
    return pid


def run(todo: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """The survivors, tried `jobs` at a time. A mutant that runs into the time limit is dead."""
    waiting, running, alive = list(reversed(todo)), dict[int, tuple[Mutant, float]](), []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[_start(mutant)] = (mutant, time.monotonic())
        for pid, (mutant, since) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() - since > TIMEOUT_S:
                os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            if done:
                del running[pid]
                if status == 0:
                    alive.append(mutant)
        time.sleep(0.005)
    return alive


def main() -> int:
    """Runs all mutants of the given files (default: all targets) and prints the survivors."""
    parser = argparse.ArgumentParser(description="Mutation testing of the maths files.")
    parser.add_argument("files", nargs="*", default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import hypothesis  # noqa: F401 - loaded here so that every child has it
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    unexplained = 0
    for path in args.files:
        if not run([unchanged(path)], 1):
            print(
                f"{path}: its tests fail as it is, or run into {TIMEOUT_S:.0f} s; mend them first", flush=True
            )
            unexplained += 1
            continue
        todo = list(mutants(path))
        alive = run(todo, args.jobs)
        for mutant in alive:
            why = EQUIVALENT.get((path, mutant.label))
            unexplained += why is None
            print(f"  {'equivalent' if why else 'SURVIVED'}  {path}:{mutant.line}: {mutant.label}")
        print(f"{path}: {len(todo) - len(alive)} of {len(todo)} killed", flush=True)
    return 1 if unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
