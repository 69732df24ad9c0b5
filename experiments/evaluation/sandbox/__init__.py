"""A sandbox for code that a model wrote. It runs confined or not at all.

`run_code` runs one program, `run_many` several side by side, `check_sandbox` says which means this machine gives and
raises if none. A program is run by a fresh interpreter of the same Python, with its packages, and `passed` if its last
statement was reached and its exit code is 0. A program that ends before, by whatever exit with whatever code, has
not passed. A program that imitates the runner's last step has: that is not kept out (see the end).

By every means:
  - The environment is empty (three variables that hold numeric libraries to one thread, and LD_LIBRARY_PATH if the
    interpreter needed it to start, are known to C but not to `os.environ`). Files that racelab has open are closed,
    its memory is another process's and may not be looked into, standard input is /dev/null.
  - Its folder is its own, empty at the start, and gone afterwards; the only one in which it can write.
  - Limits (`Limits`): wall time, CPU, memory, size of a file, number of processes and threads, what is kept of its
    output. All processes are killed at the end, also those that left the first one. Address space and CPU are limits of
    a single process, resident memory and number of processes of all together; those two are looked at every 20 ms
    (100 ms without namespaces), so a burst can pass them for as long, and memory that processes share counts for each.
  - No rights are to be gained: no capabilities, no setuid programs (no_new_privs), no new namespaces, no tracing.
  - Run by root, each program has a user id of its own that owns nothing and belongs to no account. Then the kernel
    counts its processes alone; RLIMIT_NPROC does not bind root.

`namespaces`, taken where they are allowed (as root by root's right, else by a user namespace):
  - Network: a namespace without any device but a loopback that is down. The filter below also refuses every socket but
    pairs of AF_UNIX streams.
  - Files: a root file system of its own, in which only system folders (/usr, /lib ...), a few files of /etc, five
    devices and the interpreter's own folders are seen, all read-only. Home folders, /tmp, /run and the rest do not
    exist. The program's folder is in memory and holds eight times `file_mb`.
  - Processes: a namespace with a /proc of its own. Other processes are not seen, and the kernel ends all when its first
    one ends, also if racelab is killed.
  - System V IPC, POSIX queues, host name: of its own.
  - On machines without seccomp (or neither x86_64 nor aarch64) the filter is left out. Then AF_VSOCK sockets, which no
    namespace confines, can still be opened inside a virtual machine, and the kernel's whole interface can be called.

`seccomp`, taken elsewhere, on x86_64 and aarch64 (Linux 5.13 or newer with Landlock):
  - Network: a filter of system calls refuses sockets, System V IPC, POSIX queues, io_uring, keyrings and what else
    reaches out (`box/filter.py` lists them).
  - Files: Landlock lets it read the same paths as above and write only in its folder, which is on disk. Rights, owners
    and times of files, which Landlock does not see, cannot be changed at all, not even of its own files. Names, sizes
    and owners of other files can still be asked for (stat), their content cannot. The folder is looked at every
    100 ms, and the run ended if its files hold more than eight times `file_mb` together or are more than 4096; what is
    written between two looks comes on top, and files that are removed while they are open are not seen.
  - Processes: those of other programs can be listed by probing ids, not signalled, traced or changed. The program
    cannot leave its process group, by which all are killed; nothing in /proc can be read. If the supervising process
    itself is killed by somebody, what the program started in the background lives on, still confined, up to its limit
    on CPU.
  - Run by an ordinary user, the exact number of processes is held by looking, the kernel's own limit is a few hundred
    higher, because the kernel counts there all that the user runs.

What no means here gives: the tests of a program run in the program's own process, so code that sets out to can make
them succeed: redefine what they call, or imitate the runner's last step, by reading a token from one pipe that is open
in its process and writing it to another. The token keeps out accidents (an early exit, another program in its
place), not intent. Nor is a fault in the kernel kept from being used: for code that is meant to attack, use a virtual
machine.
"""

from racelab.experiments.evaluation.sandbox.check import check_sandbox
from racelab.experiments.evaluation.sandbox.run import run_code, run_many
from racelab.experiments.evaluation.sandbox.types import (
    CodeResult,
    Limits,
    Outcome,
    SandboxError,
    SandboxKind,
)

__all__ = [
    "CodeResult",
    "Limits",
    "Outcome",
    "SandboxError",
    "SandboxKind",
    "check_sandbox",
    "run_code",
    "run_many",
]
