"""placeholder"""

from racelab.experiments.evaluation.sandbox.check import check_sandbox
from racelab.experiments.evaluation.sandbox.run import run_code, run_many
from racelab.experiments.evaluation.sandbox.types import CodeResult, Limits, SandboxError, SandboxKind

__all__ = ["CodeResult", "Limits", "SandboxError", "SandboxKind", "check_sandbox", "run_code", "run_many"]
