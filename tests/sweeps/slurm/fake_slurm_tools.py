"""The programs of `fake_slurm.py`; each is a copy of this file, under its own name. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SETTINGS: dict[str, Any] = {
    "accounting": True,  # False: "Slurm accounting storage is disabled"
    "database": True,  # False: there is accounting, but its daemon does not answer
    "unreachable": False,  # no tool reaches the controller
    "busy": 0,  # so many calls end with "Socket timed out", then all is well
    "refuse": "",  # sbatch refuses everything with these words
    "slow": {},  # tool -> seconds before it does anything
    "next_id": 1,
    "config": {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "EnforcePartLimits": "NO",
        "JobRequeue": "1",
        "JobSubmitPlugins": "(null)",
        "MaxArraySize": "1001",
        "MinJobAge": "300 sec",
        "PreemptMode": "REQUEUE",
        "PreemptType": "preempt/partition_prio",
        "SLURM_VERSION": "22.05.8",
    },
    "partitions": {
        "cpu": {"Default": "YES", "MaxTime": "1-00:00:00", "GraceTime": "10"},
        "short": {"MaxTime": "00:30:00", "GraceTime": "10"},
        "gpu": {"MaxTime": "7-00:00:00", "GraceTime": "10"},
        "high": {"MaxTime": "1-00:00:00", "PriorityTier": "10", "PreemptMode": "OFF"},
    },  # what differs from PARTITION
    "nodes": {f"node{n}": {} for n in (1, 2, 3, 4)},  # what differs from NODE
}
JOB: dict[str, Any] = {
    "name": "",
    "state": "PENDING",
    "reason": "None",
    "nodes": "",
    "exit": "0:0",  # as sacct has it
    "start": "",
    "end": "",
    "submit": "2024-11-30T08:00:00",  # UTC, as all times
    "elapsed_s": 0,
    "limit_min": 240,
    "restarts": 0,
    "mine": True,  # False: another user's
    "queue": True,  # squeue knows it
    "record": True,  # sacct does
    "by": "",  # number of the user who cancelled it
    "attempts": [],  # earlier ones, as sacct has them: the same keys, as far as they differ
    "partition": "cpu",
    "script": "",
}
PARTITION = (
    "PartitionName=? AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node[1-4] PriorityJobFactor=1 PriorityTier=1 "
    "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=128 "
    "TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=128,mem=800000M,node=4,billing=128"
)
NODE = (
    "NodeName=? Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=32 CPUTot=32 CPULoad=0.42 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:h100:8 NodeAddr=10.0.0.1 NodeHostName=? Port=29401 Version=22.05.8 "
    "OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=200000 AllocMem=0 FreeMem=19790 Sockets=32 Boards=1 "
    "State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=cpu,short,gpu,high  "
    "BootTime=2024-11-29T21:13:25 SlurmdStartTime=2024-11-30T08:01:21 LastBusyTime=2024-11-30T08:02:05 "
    "CfgTRES=cpu=32,mem=200000M,billing=32 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s "
    "ExtSensorsWatts=0 ExtSensorsTemp=n/s "
)
ALIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING")


def new_job(fields: dict[str, Any]) -> dict[str, Any]:
    unknown = fields.keys() - JOB.keys()
    assert not unknown, unknown
    return {**JOB, **fields}


@contextlib.contextmanager
def open_state(folder: str) -> Iterator[dict[str, Any]]:
    """The state, for one process at a time; what is changed in it is kept."""
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(f"{folder}/state.json") as handle:
            state = json.load(handle)
        try:
            yield state
        finally:
            with open(f"{folder}/state.new", "w") as handle:
                json.dump(state, handle)
            os.replace(f"{folder}/state.new", f"{folder}/state.json")


class _Failed(Exception):
    """The tool says something on stderr and ends with a code."""

    def __init__(self, words: str, code: int = 1) -> None:
        super().__init__(words)
        self.code = code


def main() -> None:
    """One call of one tool."""
    folder, tool = os.path.split(os.path.abspath(sys.argv[0]))
    words = sys.argv[1:]
    with open_state(folder) as state:
        entry = {"tool": tool, "arguments": words, "environment": dict(os.environ)}
        with open(f"{folder}/calls.jsonl", "a") as handle:
            handle.write(json.dumps(entry) + "\n")
        pause = float(state["slow"].get(tool, 0))
    time.sleep(pause)
    try:
        with open_state(folder) as state:
            _reach(state, tool, words)
            sys.stdout.write({
                "squeue": _squeue, "sacct": _sacct, "scontrol": _scontrol, "sbatch": _sbatch, "scancel": _scancel,
            }[tool](state, words))  # fmt: skip
    except _Failed as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(failure.code)


def _reach(state: dict[str, Any], tool: str, words: list[str]) -> None:
    """Fails if the controller is away."""
    if tool == "sacct":
        return
    if state["busy"]:
        state["busy"] -= 1
        reason = "Socket timed out on send/recv operation"
    elif state["unreachable"]:
        reason = "Unable to contact slurm controller (connect failure)"
    else:
        return
    before = {
        "squeue": "slurm_load_jobs error: ",
        "scancel": f"scancel: error: Kill job error on job id {words[:1]}: ",
    }
    if tool == "sbatch":
        test = "--test-only" in words
        raise _Failed(
            f"{'allocation failure' if test else 'sbatch: error: Batch job submission failed'}: {reason}"
        )
    if tool == "scontrol":
        if words[0] == "requeue":
            raise _Failed(f"Unexpected message received for job {words[1]}")
        what = {
            "config": "slurm_load_ctl_conf",
            "partition": "slurm_load_partitions",
            "node": "slurm_load_node",
        }
        raise _Failed(f"{what[words[-1]]} error: {reason}")
    raise _Failed(before[tool] + reason, 8 if tool == "scancel" else 1)


def _options(words: list[str], flags: str, values: str) -> tuple[dict[str, str], list[str]]:
    """(options, other words); options are named as they are written. Others than those listed are an error."""
    found, rest = {}, []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word in flags.split():
            found[word] = ""
        elif word in values.split():
            found[word] = left.pop(0)
        elif equals and f"{name}=" in values.split():
            found[name] = value
        elif word.startswith("-"):
            raise _Failed(f"fake_slurm does not know {word}", 99)
        else:
            rest.append(word)
    return found, rest


def matching(state: dict[str, Any], job_id: str) -> list[str]:
    """The jobs that an id stands for."""
    return [task for task in state["jobs"] if task == job_id or task.startswith(f"{job_id}_")]


def _squeue(state: dict[str, Any], words: list[str]) -> str:
    options, _ = _options(words, "-a -h -r --me", "-t -O -o -j")
    assert "-h" in options, "a headline is not made"
    assert "-r" in options, "arrays are shown task by task only"
    ids = options.get("-j", "").split(",") if "-j" in options else []
    tasks = [task for job_id in ids for task in matching(state, job_id)] if ids else list(state["jobs"])
    tasks = [task for task in tasks if state["jobs"][task]["queue"]]
    arrays = {task.partition("_")[0] for task in state["jobs"] if state["jobs"][task]["queue"]}
    if len(ids) == 1 and ids[0].partition("_")[0] not in arrays:
        raise _Failed("slurm_load_jobs error: Invalid job id specified")
    if "--me" in options:
        tasks = [task for task in tasks if state["jobs"][task]["mine"]]
    if options.get("-t") != "all":
        tasks = [task for task in tasks if state["jobs"][task]["state"] in ALIVE]
    return "".join(_queue_line(task, state["jobs"][task], options) + "\n" for task in tasks)


def _queue_line(task: str, job: dict[str, Any], options: dict[str, str]) -> str:
    code, _, signal = job["exit"].partition(":")
    fields = {
        "JobArrayID": task, "State": job["state"], "Reason": job["reason"], "NodeList": job["nodes"],
        "exit_code": str(int(code) << 8 | int(signal)), "StartTime": job["start"] or "N/A",
        "EndTime": job["end"] or "N/A", "SubmitTime": job["submit"], "TimeUsed": _clock(job["elapsed_s"]),
        "TimeLimit": _clock(60 * job["limit_min"]), "RestartCnt": str(job["restarts"]), "Name": job["name"],
    }  # fmt: skip
    if "-o" in options:
        short = {"%i": "JobArrayID", "%T": "State", "%j": "Name", "%r": "Reason", "%N": "NodeList"}
        return re.sub(r"%\w", lambda match: fields[short[match[0]]], options["-o"])
    columns = [column.partition(":") for column in options["-O"].split(",")]
    # Without a colon Slurm cuts the field to 20 characters.
    return "".join(
        fields[name] + suffix if colon else f"{fields[name]:20.20}" for name, colon, suffix in columns
    )


def _clock(seconds: int) -> str:
    """As squeue writes durations: 0:04, 1:30:00, 1-02:04:00."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _sacct(state: dict[str, Any], words: list[str]) -> str:
    options, _ = _options(words, "-X -D -P -n", "-o -j -u --delimiter= --starttime=")
    if not state["accounting"]:
        raise _Failed("Slurm accounting storage is disabled")
    if not state["database"]:
        raise _Failed(
            "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to "
            "host:127.0.0.1:27999: Connection refused\n"
            "sacct: error: Sending PersistInit msg: Connection refused\n"
            "sacct: error: Problem talking to the database: Connection refused"
        )
    assert {"-X", "-D", "-P", "-n"} <= options.keys(), "a headline and steps are not made"
    ids = options["-j"].split(",") if "-j" in options else list(state["jobs"])
    tasks = dict.fromkeys(task for job_id in ids for task in matching(state, job_id))
    rows: dict[tuple[str, ...], list[str]] = {}
    for task in tasks:
        job = state["jobs"][task]
        if not job["record"] or ("-u" in options and not job["mine"]):
            continue
        for attempt in [*({**job, **earlier} for earlier in job["attempts"]), job]:
            if attempt["end"] and attempt["end"] < options["--starttime"]:
                continue
            fields = _record(task, attempt)
            array, _, index = task.partition("_")
            together = bool(index) and not attempt["start"]  # tasks that never started share a line
            fields["JobID"] = f"{array}_[" if together else task
            line = tuple(fields[name] for name in options["-o"].split(","))
            rows.setdefault((*line, "" if together else str(len(rows))), []).append(index)
    lines = []
    for (job_id, *others, _), indices in rows.items():
        listed = ",".join(indices)
        if len(listed) > 64 and os.environ.get("SLURM_BITSTR_LEN") != "0":
            listed = listed[:61] + "..."
        lines.append([f"{job_id}{listed}]" if job_id.endswith("[") else job_id, *others])
    return "".join(options["--delimiter"].join(line) + "\n" for line in lines)


def _record(task: str, job: dict[str, Any]) -> dict[str, str]:
    never = not job["start"]
    by = f" by {job['by']}" if job["by"] else ""
    return {
        "JobID": task, "State": job["state"] + by, "Reason": job["reason"],
        "NodeList": job["nodes"] or "None assigned", "ExitCode": job["exit"],
        "Start": job["start"] or ("None" if never and job["end"] else "Unknown"), "End": job["end"] or "Unknown",
        "Submit": job["submit"], "ElapsedRaw": str(job["elapsed_s"]), "TimelimitRaw": str(job["limit_min"]),
        "JobName": job["name"],
    }  # fmt: skip


def _scontrol(state: dict[str, Any], words: list[str]) -> str:
    options, rest = _options(words, "-a -o", "")
    if rest == ["show", "config"]:
        lines = [f"{key:<23} = {value}" for key, value in state["config"].items()]
        head, foot = "Configuration data as of 2024-11-30T08:02:27", "Slurmctld(primary) at vm is UP"
        return "\n".join([head, *lines, "", foot, ""])
    if rest[:1] == ["requeue"]:
        return _requeue(state, rest[1])
    assert "-o" in options, "one line for each"
    if rest == ["show", "partition"]:
        found = {
            name: fields
            for name, fields in state["partitions"].items()
            if "-a" in options or fields.get("Hidden") != "YES"
        }
        return "".join(
            _filled(PARTITION, {"PartitionName": name, **fields}) for name, fields in found.items()
        )
    assert rest == ["show", "node"], rest
    every = state["nodes"].items()
    return "".join(
        _filled(NODE, {"NodeName": name, "NodeHostName": name, **fields}) for name, fields in every
    )


def _filled(line: str, fields: dict[str, str]) -> str:
    """A line of scontrol with other values; Slurm shows DenyAccounts in the place of AllowAccounts."""
    for key, value in fields.items():
        place = "AllowAccounts" if key == "DenyAccounts" else key
        line, count = re.subn(rf"(?<!\S){place}=\S*", f"{key}={value}", line)
        assert count == 1, key
    return f"{line}\n"


def _requeue(state: dict[str, Any], job_id: str) -> str:
    job = state["jobs"].get(job_id)
    if job is None or not job["queue"]:
        raise _Failed(f"Invalid job id specified for job {job_id}")
    if not job["mine"]:
        raise _Failed(f"Access/permission denied for job {job_id}")
    if job["state"] == "PENDING":
        raise _Failed(f"Job is pending execution for job {job_id}")
    ended = {key: job[key] for key in ("nodes", "start", "elapsed_s", "submit", "reason")}
    attempts = [*job["attempts"], {**ended, "state": "REQUEUED", "end": _now()}]
    again = {"state": "PENDING", "reason": "BeginTime", "nodes": "", "start": "", "end": "", "elapsed_s": 0}
    state["jobs"][job_id] = {
        **job,
        **again,
        "submit": _now(),
        "restarts": job["restarts"] + 1,
        "attempts": attempts,
    }
    return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())


def _sbatch(state: dict[str, Any], words: list[str]) -> str:
    options, rest = _options(words, "--test-only --parsable", "")
    asked = _directives(rest[0])
    test = "--test-only" in options
    reason = state["refuse"] or _impossible(state, asked, test)
    if reason:
        names = [
            name for name in asked.get("partition", "").split(",") if name and name not in state["partitions"]
        ]
        first = (
            f"sbatch: error: invalid partition specified: {names[0]}\n"
            if names and not state["refuse"]
            else ""
        )
        start = "allocation failure" if test else "sbatch: error: Batch job submission failed"
        raise _Failed(f"{first}{start}: {reason}")
    job_id = str(state["next_id"])
    state["next_id"] += 1
    partition = asked.get("partition") or next(
        n for n, p in state["partitions"].items() if p.get("Default") == "YES"
    )
    if test:
        sys.stderr.write(
            f"sbatch: Job {job_id} to start at 2024-11-30T08:20:10 using 1 processors on nodes node1 in partition "
            f"{partition}\n"
        )
        return ""
    first, _, last = asked.get("array", "").partition("%")[0].partition("-")
    indices = range(int(first), int(last or first) + 1) if first else [None]
    for index in indices:
        state["jobs"][job_id if index is None else f"{job_id}_{index}"] = new_job({
            "name": asked.get("job-name", os.path.basename(rest[0])), "submit": _now(), "reason": "Priority",
            "limit_min": _minutes(asked.get("time", "10")), "partition": partition,
            "script": os.path.abspath(rest[0]),
        })  # fmt: skip
    return f"{job_id}\n" if "--parsable" in options else f"Submitted batch job {job_id}\n"


def _minutes(text: str) -> int:
    """Of `240`, `240:00`, `4:00:00`, `1-00:00:00`."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes = [*parts, 0][:2]
    else:
        hours, minutes = parts[:2] if len(parts) == 3 else (0, parts[0])
    return (int(days or 0) * 24 + hours) * 60 + minutes


def _directives(script: str) -> dict[str, str]:
    """The #SBATCH options of a script, by name; flags are empty."""
    found = {}
    with open(script) as handle:
        lines = handle.read().splitlines()
    if not lines or not lines[0].startswith("#!"):
        raise _Failed("sbatch: error: This does not look like a batch script.  The first")
    for line in lines[1:]:
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH")):
                name, _, value = word.removeprefix("--").partition("=")
                found[name] = value
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _impossible(state: dict[str, Any], asked: dict[str, str], test: bool) -> str:
    """Slurm's reason to refuse; "" if it takes the job."""
    names = [name for name in asked.get("partition", "").split(",") if name]
    if any(name not in state["partitions"] for name in names):
        return "Invalid partition name specified"
    if not names and not any(p.get("Default") == "YES" for p in state["partitions"].values()):
        return "No partition specified or system default partition"
    if any(state["partitions"][name].get("State") in ("DRAIN", "INACTIVE") for name in names):
        return "Required partition not available (inactive or drain)"
    last = asked.get("array", "0").partition("%")[0].rpartition("-")[2]
    if int(last) >= int(state["config"]["MaxArraySize"]):
        return "Invalid job array specification"
    every = [
        _filled(NODE, {"NodeName": n, "NodeHostName": n, **fields}) for n, fields in state["nodes"].items()
    ]
    up = [node for node in every if not re.search(r" State=\S*(DOWN|DRAIN)", node)]

    def fits(node: str) -> bool:
        cpus, gpus, memory = (
            int(match[1]) if match else 0
            for match in (
                re.search(p, node) for p in (r"CPUTot=(\d+)", r"gpu:h100:(\d+)", r"RealMemory=(\d+)")
            )
        )
        gigabytes = re.fullmatch(r"(\d+)G(?:B)?", asked.get("mem", "0G"))
        megabytes = int(gigabytes[1]) * 1024 if gigabytes else int(re.sub(r"\D", "", asked["mem"]))
        return (
            int(asked.get("cpus-per-task", "1")) <= cpus
            and int(asked.get("gpus-per-node", "0")) <= gpus
            and megabytes <= memory
        )

    # --test-only looks at the nodes that are up; submitting, at all, and takes more nodes than there are.
    fitting = [node for node in (up if test else every) if fits(node)]
    if len(fitting) < (int(asked.get("nodes", "1").partition("-")[0]) if test else 1):
        return "Requested node configuration is not available"
    return ""


def _scancel(state: dict[str, Any], words: list[str]) -> str:
    _, ids = _options(words, "", "")
    bad = [job_id for job_id in ids if not re.fullmatch(r"\d+(_\d+)?", job_id)]
    if bad:
        raise _Failed(f"scancel: error: Invalid job id {bad[0]}")
    denied = []
    for job_id in ids:
        for task in matching(state, job_id):
            job = state["jobs"][task]
            if not job["queue"] or job["state"] not in ALIVE:
                continue
            if not job["mine"]:
                denied.append(f"scancel: error: Kill job error on job id {job_id}: Access/permission denied")
            elif job["state"] == "PENDING" and "_" in job_id:
                del state["jobs"][
                    task
                ]  # Slurm keeps no trace of a task that is cancelled alone before its start
                array = job_id.partition("_")[0]
                if not matching(state, array):
                    state["jobs"][array] = {
                        **job,
                        "state": "CANCELLED",
                        "by": str(os.getuid()),
                        "end": _now(),
                    }
            else:
                code = "0:0" if job["state"] == "PENDING" else "0:15"
                job.update(state="CANCELLED", by=str(os.getuid()), end=_now(), exit=code)
    if denied:
        raise _Failed("\n".join(dict.fromkeys(denied)), 210)
    return ""


if __name__ == "__main__":
    main()
