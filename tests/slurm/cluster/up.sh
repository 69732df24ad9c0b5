#!/usr/bin/env bash
# up.sh: a real Slurm on this machine for tests: munged, mariadbd, slurmdbd, slurmctld and a slurmd per virtual node.
# As root, without systemd. Idempotent. Options: common.sh. Touches nothing outside its folder, but for the bridge and
# the namespaces of netns mode. Then: . $RACELAB_SLURM_DIR/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$HERE/configure.sh"

NODES=${RACELAB_SLURM_NODES:-4} CPUS=${RACELAB_SLURM_CPUS:-32} GPUS=${RACELAB_SLURM_GPUS:-8}
NET=${RACELAB_SLURM_NET:-host} SUBNET=${RACELAB_SLURM_SUBNET:-10.231.77}
ACCOUNTING=${RACELAB_SLURM_ACCOUNTING:-dbd} PREEMPT=${RACELAB_SLURM_PREEMPT:-REQUEUE} SIGNAL=${RACELAB_SLURM_SIGNAL:-on}

say() { echo "[up ${SECONDS}s] $*"; }
die() {
  say "ERROR: $*" >&2
  tail -n 15 "$DIR"/log/* >&2 2>/dev/null || true
  exit 1
}
listens() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# A block of ports below those that the kernel hands out. From a random start: two clusters may come up at once.
free_ports() {
  local first port tries
  for ((tries = 0; tries < 100; tries++)); do
    first=$((20000 + RANDOM % 375 * 32))
    for port in 0 1 2 3 11 12 13 14; do listens $((first + port)) && continue 2; done
    echo "$first"
    return
  done
  die "no 32 free ports in a row between 20000 and 32000"
}

options() {
  local problem=
  case $NET in host | netns) ;; *) problem="RACELAB_SLURM_NET=$NET: host or netns" ;; esac
  case $ACCOUNTING in dbd | none) ;; *) problem="RACELAB_SLURM_ACCOUNTING=$ACCOUNTING: dbd or none" ;; esac
  case $PREEMPT in REQUEUE | CANCEL) ;; *) problem="RACELAB_SLURM_PREEMPT=$PREEMPT: REQUEUE or CANCEL" ;; esac
  case $SIGNAL in on | off) ;; *) problem="RACELAB_SLURM_SIGNAL=$SIGNAL: on or off" ;; esac
  ((NODES >= 1 && NODES <= 20)) || problem="RACELAB_SLURM_NODES=$NODES: 1 to 20"
  [ "$(id -u)" = 0 ] || problem="only root can do this"
  [ "$NET" = host ] || command -v ip >/dev/null || problem="netns mode needs the Debian package iproute2"
  [ -z "$problem" ] || { echo "$problem" >&2; exit 2; }
}

# A cluster that is up keeps its options; only one that is down may be given others.
remember() {
  local before=
  [ -s "$DIR/env.sh" ] && before=$(sed -n 's/^export RACELAB_SLURM_PORT=//p' "$DIR/env.sh")
  PORT=${RACELAB_SLURM_PORT:-${before:-$(free_ports)}}
  cat >"$DIR/env.sh.new" <<ENV
export SLURM_CONF=$DIR/etc/slurm.conf
export RACELAB_SLURM_DIR=$DIR
export RACELAB_SLURM_PORT=$PORT
export RACELAB_SLURM_NODES=$NODES RACELAB_SLURM_CPUS=$CPUS RACELAB_SLURM_GPUS=$GPUS
export RACELAB_SLURM_NET=$NET RACELAB_SLURM_SUBNET=$SUBNET
export RACELAB_SLURM_ACCOUNTING=$ACCOUNTING RACELAB_SLURM_PREEMPT=$PREEMPT RACELAB_SLURM_SIGNAL=$SIGNAL
ENV
  if ours slurmctld slurmctld >/dev/null && ! cmp -s "$DIR/env.sh.new" "$DIR/env.sh"; then
    echo "the cluster in $DIR is up with other options ($DIR/env.sh); run down.sh first" >&2
    exit 2
  fi
  mv "$DIR/env.sh.new" "$DIR/env.sh"
}

# netns mode: a bridge of our own, and behind it a namespace with one address per node.
network() {
  local bridge=rlb$PORT i namespace link
  ip link show "$bridge" >/dev/null 2>&1 || { ip link add "$bridge" type bridge && ip addr add "$SUBNET.254/24" dev "$bridge"; }
  ip link set "$bridge" up
  # Should the bridge ever go first, nothing leaves this machine.
  ip route replace unreachable "$SUBNET.0/24" metric 9999
  for ((i = 1; i <= NODES; i++)); do
    namespace=racelab$PORT-node$i link=rlv$PORT-$i
    [ -e "/run/netns/$namespace" ] && continue
    ip netns add "$namespace"
    ip link add "$link" type veth peer name eth0 netns "$namespace"
    ip link set "$link" master "$bridge" up
    ip -n "$namespace" link set lo up
    ip -n "$namespace" addr add "$SUBNET.$i/24" dev eth0
    ip -n "$namespace" link set eth0 up
  done
}

munge() {
  ours munged munged >/dev/null || {
    rm -f "$RUN"/munge.sock*
    munged --key-file="$DIR/etc/munge.key" --socket="$RUN/munge.sock" --pid-file="$RUN/munged.pid" \
      --log-file="$DIR/log/munged.log" --seed-file="$RUN/munge.seed" --num-threads=4
  }
  until_ok 10 bash -c "command munge -n -S '$RUN/munge.sock' | unmunge -S '$RUN/munge.sock'" || die "munged does not answer"
}

sql() { mariadb --no-defaults -uroot -S "$RUN/mysql.sock" -e "$1"; }

accounting() {
  [ -d "$DIR/db/mysql" ] || mariadb-install-db --defaults-file="$DIR/etc/my.cnf" --skip-test-db \
    --auth-root-authentication-method=socket >"$DIR/log/mariadb-install.log" 2>&1 || die mariadb-install-db
  ours mariadbd mariadbd >/dev/null || {
    setsid mariadbd --defaults-file="$DIR/etc/my.cnf" </dev/null >>"$DIR/log/mariadbd.out" 2>&1 &
  }
  until_ok 30 sql "select 1" || die "mariadbd does not answer"
  sql "create database if not exists slurm_acct;
       create user if not exists slurm@'127.0.0.1' identified by 'slurm';
       grant all on slurm_acct.* to slurm@'127.0.0.1';"
  say "database is up"
  ours slurmdbd slurmdbd >/dev/null || slurmdbd
  until_ok 30 timeout 5 sacctmgr -n show cluster || die "slurmdbd does not answer"
  # slurmctld's first start is fatal unless slurmdbd knows the cluster.
  sacctmgr -n -P show cluster format=cluster | grep -qx racelab || sacctmgr -i add cluster racelab >/dev/null
  sacctmgr -n -P show user root format=user | grep -qx root || {
    sacctmgr -i add account lab cluster=racelab >/dev/null
    sacctmgr -i add user root account=lab cluster=racelab >/dev/null
  }
  say "accounting is up"
}

idle() { [ "$(timeout 5 sinfo -h -N -o '%N %T' | sort -u | grep -cE ' (idle|mixed|allocated|completing)$')" = "$NODES" ]; }

nodes() {
  local i starts=()
  for ((i = 1; i <= NODES; i++)); do
    "$HERE/node.sh" start "node$i" &
    starts+=($!)
  done
  for i in "${starts[@]}"; do wait "$i" || die "a slurmd did not start"; done
  until_ok 30 idle || die "nodes are not idle: $(timeout 5 sinfo -h -N -o '%N %T %E' | tr '\n' ';')"
}

options
mkdir -p "$DIR"/{etc,log,run,state,spool,dev,db,db-tmp}
chmod 755 "$DIR"
remember
address=127.0.0.1
[ "$NET" = host ] || { network; address=$SUBNET.254; }
configure "$address"
munge
[ "$ACCOUNTING" = none ] || accounting
ours slurmctld slurmctld >/dev/null || slurmctld
until_ok 20 timeout 5 scontrol ping || die "slurmctld does not answer"
nodes
say "ready: . $DIR/env.sh"
