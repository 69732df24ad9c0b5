#!/usr/bin/env bash
# down.sh [--purge]: ends what up.sh started in this folder, by pid file, and nothing else. --purge: the folder goes too.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ -d "$DIR" ] || exit 0
[ -s "$DIR/env.sh" ] || { echo "$DIR is no folder of a test cluster: it has no env.sh" >&2; exit 2; }
. "$DIR/env.sh"

daemons=(slurmctld slurmdbd mariadbd munged)
signal() { # NAME SIGNAL
  local pid
  pid=$(ours "$1" "$1") && kill "-$2" "$pid" 2>/dev/null || true
}
gone() { ! ours "$1" "$1" >/dev/null; }

if [ "${1:-}" != --purge ] && ours slurmctld slurmctld >/dev/null; then # the next up.sh finds no jobs
  timeout 5 scancel --user=root 2>/dev/null || true
  empty() { [ -z "$(timeout 3 squeue -h 2>/dev/null)" ]; }
  until_ok 10 empty || true
fi
for pid_file in "$RUN"/node*.pid; do
  [ -e "$pid_file" ] && "$HERE/node.sh" kill "$(basename "$pid_file" .pid)"
done
for daemon in "${daemons[@]}"; do # in this order: each writes its last words to the next
  signal "$daemon" TERM
  until_ok 8 gone "$daemon" || signal "$daemon" KILL
  rm -f "$RUN/$daemon.pid"
done

if [ "$RACELAB_SLURM_NET" = netns ]; then
  for namespace in /run/netns/racelab"$RACELAB_SLURM_PORT"-node*; do
    [ -e "$namespace" ] || continue
    ip link del "rlv$RACELAB_SLURM_PORT-${namespace##*-node}" # else it outlives its namespace by a while
    ip netns del "${namespace##*/}"
  done
  ip link del "rlb$RACELAB_SLURM_PORT" 2>/dev/null || true
  ip route del unreachable "$RACELAB_SLURM_SUBNET.0/24" metric 9999 2>/dev/null || true
fi
[ "${1:-}" != --purge ] || rm -rf "$DIR"
