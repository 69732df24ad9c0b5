"""The process that a job starts on each of its nodes: it works on one task, and sees to it that the task is not lost.

    python -u -P -m racelab.sweeps.slurm.entry LAUNCH_FOLDER BATCH NUMBER

What Slurm 22.05 does to it, as measured; most of this file's neighbours follow from these facts:

- **Every signal reaches every process of the step**, sessions and process groups notwithstanding: the child, what the
  child started, and a `squeue` that is being asked just then. So the child ignores SIGUSR2, whose default would end it
  at once, and whoever asks the scheduler asks again when the answer stays away.
- **Preemption**: SIGCONT and SIGTERM; where the site has `preempt_send_user_signal`, SIGCONT and SIGUSR2 instead, and
  SIGTERM only when the grace time is over. Until then the state is RUNNING. A job whose process just ends has failed
  and is not requeued; one that asks for its requeue is. So SIGUSR2 alone does not mean the time limit.
- **Time limit**: SIGUSR2 `signal_delay_s` before it or earlier (3 and 18 s seen, up to 60 s promised), state RUNNING.
  The limit itself came up to 27 s late; then SIGTERM, state COMPLETING, and the job is a TIMEOUT that nobody requeues.
- **scancel and `scontrol requeue` from outside**: SIGCONT and SIGTERM, state COMPLETING within 0.1 s. SIGKILL follows
  after KillWait. `scancel --signal=TERM` looks like a preemption.
- **A requeue that was asked for** does the same to the one who asked: SIGTERM within 0.1 s.
- **`srun --kill-on-bad-exit`**: when one rank fails the others get SIGTERM and, KillWait later, SIGKILL; the state is
  RUNNING as in a preemption. So a rank that fails says so before it ends (`End`), and the first then asks for nothing.
- A process that outlives the step and holds its output makes slurmd wait, call the node broken and drain it. So
  nothing of the child's process group is left behind.

This module is loaded before the handlers are set, and a signal in that time would end a job that could have been
requeued; hence it imports next to nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from racelab.sweeps.slurm.asked import Asked

if TYPE_CHECKING:
    from racelab.sweeps.slurm.supervise import Words


def main(arguments: Sequence[str] | None = None, words: Words | None = None) -> int:
    """Works on the task; returns the exit code.

    Args:
        arguments: launch folder, batch, number of the submission; those of the command line by default.
        words: what gives the child's command line; `supervise.child_words` by default.
    """
    asked = Asked()
    asked.listen()
    from racelab.experiments.errors import RacelabError
    from racelab.sweeps.slurm.supervise import child_words
    from racelab.sweeps.slurm.work import begin

    try:
        return begin(
            sys.argv[1:] if arguments is None else arguments, os.environ, asked, words or child_words
        )
    except RacelabError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        import traceback

        traceback.print_exc()  # what a job prints is its log
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
