#!/usr/bin/env bash
# node.sh start|stop|kill|pid NODE: one virtual node, a process tree with a hostname and pids of its own.
#   start  the whole node, or its slurmd alone where the node lives without
#   stop   slurmd ends, its running steps live on (a daemon's crash)
#   kill   power loss: the namespace's first process is killed, and with it everything inside
#   pid    prints that first process's pid as the machine sees it
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
. "$DIR/env.sh"
action=$1 node=$2
slurmd_pid=$RUN/slurmd.$node.pid # written by slurmd: its pid as the node sees it

first() { ours "$node" bash; }
inside() { nsenter -t "$(first)" --pid --mount --uts --net -- "$@"; }
# Signals the node's slurmd. The mount namespace's /proc tells whether the number is still slurmd's.
slurmd_signal() {
  local pid
  pid=$(cat "$slurmd_pid" 2>/dev/null) && [ "${pid:-0}" -gt 1 ] || return 1
  inside bash -c '[ "$(cat "/proc/$2/comm")" = slurmd ] && kill "-$1" "$2"' _ "$1" "$pid" 2>/dev/null
}

# slurmd turns into a daemon before it has found out whether it can work; this line of its log says that it can.
starts() { grep -c "slurmd started on" "$DIR/log/slurmd.$node.log" 2>/dev/null || true; }
serves() { [ "$(starts)" != "$before" ] && slurmd_signal 0; }

boot() {
  local outer pid enter=()
  mkdir -p "$DIR/spool/$node"
  rm -f "$slurmd_pid"
  # Not `ip netns exec`: it mounts another /sys, where slurmd finds no cgroups.
  [ "$RACELAB_SLURM_NET" = host ] || enter=(nsenter "--net=/run/netns/racelab$RACELAB_SLURM_PORT-$node")
  # bash stays as the namespace's first process: it reaps orphans, as init does.
  setsid "${enter[@]}" unshare --uts --pid --fork --mount-proc --kill-child=KILL \
    bash -c 'hostname "$1"; slurmd -N "$1"; while :; do sleep 3600 & wait $!; done' _ "$node" \
    </dev/null >>"$DIR/log/$node.out" 2>&1 &
  outer=$!
  forked() { pid=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null) && pid=${pid%% *} && [ "$(cat "/proc/$pid/comm")" = bash ]; }
  until_ok 10 forked || return 1
  echo "$pid" >"$RUN/$node.pid"
}

case $action in
start)
  slurmd_signal 0 && exit 0
  before=$(starts)
  if first >/dev/null; then
    inside slurmd -N "$node" </dev/null >>"$DIR/log/$node.out" 2>&1
  else
    boot
  fi
  until_ok 10 serves || { tail -n 5 "$DIR/log/$node.out" "$DIR/log/slurmd.$node.log" >&2; exit 1; }
  ;;
stop)
  slurmd_signal TERM || exit 0
  gone() { ! slurmd_signal 0; }
  until_ok 10 gone
  ;;
kill)
  pid=$(first) || exit 0
  kill -KILL "$pid"
  rm -f "$RUN/$node.pid" "$slurmd_pid"
  gone() { ! kill -0 "$pid"; }
  until_ok 10 gone
  ;;
pid) first ;;
*) echo "$action: start, stop, kill or pid" >&2; exit 2 ;;
esac
