# Sourced by up.sh, node.sh and down.sh: where a test cluster lives, its options, and what may be signalled there.
# Options, all from the environment; up.sh writes them to $RACELAB_SLURM_DIR/env.sh, where the other two read them:
#   RACELAB_SLURM_DIR         folder of the cluster, short: unix sockets live in it   (/tmp/racelab-slurm)
#   RACELAB_SLURM_PORT        first of 32 free ports                                  (chosen by up.sh)
#   RACELAB_SLURM_NODES       virtual nodes node1 ... nodeN                           (4)
#   RACELAB_SLURM_CPUS        CPUs that each of them claims                           (32)
#   RACELAB_SLURM_GPUS        fake GPUs of each                                       (8)
#   RACELAB_SLURM_NET         host: all on 127.0.0.1 | netns: a network namespace per node (host)
#   RACELAB_SLURM_SUBNET      netns: first three numbers of the addresses             (10.231.77)
#   RACELAB_SLURM_ACCOUNTING  dbd: MariaDB and slurmdbd, so that sacct works | none   (dbd)
#   RACELAB_SLURM_PREEMPT     what becomes of a preempted job: REQUEUE | CANCEL       (REQUEUE)
#   RACELAB_SLURM_SIGNAL      on: victims also get their --signal, not only SIGTERM | off (on)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:/usr/sbin:/sbin

DIR=${RACELAB_SLURM_DIR:-/tmp/racelab-slurm}
RUN=$DIR/run
if [[ ! $DIR =~ ^/[A-Za-z0-9/._-]{1,60}$ ]]; then
  echo "RACELAB_SLURM_DIR=$DIR: wanted an absolute path of at most 60 letters, digits and ._- (no spaces)" >&2
  exit 2
fi
# Every process of the cluster carries this variable; by it ours are told from a stranger with a recycled pid.
export RACELAB_SLURM_DIR=$DIR SLURM_CONF=$DIR/etc/slurm.conf

# ours NAME COMM: prints the pid in run/NAME.pid if that process lives, is a COMM and belongs to this cluster.
ours() {
  local pid
  pid=$(cat "$RUN/$1.pid" 2>/dev/null) && [ -n "$pid" ] || return 1
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF "RACELAB_SLURM_DIR=$DIR" || return 1
  echo "$pid"
}

# until_ok SECONDS COMMAND...: tries it ten times a second, each try at most five seconds long; quietly.
until_ok() {
  local end=$((SECONDS + $1))
  shift
  while ! "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.1
  done
}
