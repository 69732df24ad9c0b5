# Sourced by up.sh: the configuration files of a test cluster.

# Ports: +0 slurmctld, +1 slurmd (netns), +2 slurmdbd, +3 mariadbd, +11 ... the nodes' slurmd (host).
write_slurm_conf() { # ADDRESS_OF_SLURMCTLD
  cat <<CONF
ClusterName=racelab
SlurmctldHost=$(hostname -s)($1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
AuthType=auth/munge
# cred_expire: a requeued job may not start again before that many seconds; Slurm's default is 120.
AuthInfo=socket=$RUN/munge.sock,cred_expire=5

# No cgroups, no binding: the nodes share one machine and claim hardware that it has not.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
GresTypes=gpu
MaxArraySize=1001
MaxJobCount=10000

# Scheduling within a second or two, not within a minute.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2,bf_window=1440,requeue_delay=1
PriorityType=priority/basic
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without it, a job that names no memory takes all of its node's.
DefMemPerCPU=2000

PreemptType=preempt/partition_prio
PreemptMode=$PREEMPT
PreemptExemptTime=00:00:00
JobRequeue=1
$([ "$SIGNAL" = off ] || echo SlurmctldParameters=preempt_send_user_signal)

# A lost node is noticed in 25 s, and a node that comes back is taken back whatever it was down for.
SlurmctldTimeout=20
SlurmdTimeout=15
ReturnToService=2
MessageTimeout=10
TCPTimeout=2
BatchStartTimeout=20
UnkillableStepTimeout=20
KillWait=3
CompleteWait=0
InactiveLimit=0
Waittime=0
HealthCheckInterval=0
# squeue and scontrol remember an ended job for that long.
MinJobAge=600
CONF
  if [ "$ACCOUNTING" = dbd ]; then
    cat <<CONF

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 2))
# The link to slurmdbd reads its munge socket here, not in AuthInfo.
AccountingStoragePass=$RUN/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_env,job_script
CONF
  else
    printf '\n%s\n' AccountingStorageType=accounting_storage/none
  fi
  local i address=127.0.0.1 port
  echo
  for ((i = 1; i <= NODES; i++)); do
    port=$((PORT + 10 + i))
    [ "$NET" = host ] || { address=$SUBNET.$i port=$((PORT + 1)); }
    echo "NodeName=node$i NodeHostname=node$i NodeAddr=$address Port=$port CPUs=$CPUS RealMemory=200000 Gres=gpu:h100:$GPUS"
  done
  cat <<CONF

# Jobs in high take the place of jobs in the others: a victim gets SIGTERM, ten seconds, then PreemptMode.
PartitionName=DEFAULT Nodes=ALL State=UP PreemptMode=$PREEMPT GraceTime=10 PriorityTier=1
PartitionName=cpu   Default=YES MaxTime=1-0 DefaultTime=10
PartitionName=short MaxTime=30  DefaultTime=2
PartitionName=gpu   MaxTime=7-0 DefaultTime=10
PartitionName=high  MaxTime=1-0 DefaultTime=10 PriorityTier=10 PreemptMode=OFF
CONF
}

write_gres_conf() {
  echo AutoDetect=off
  ((GPUS == 0)) || echo "NodeName=node[1-$NODES] Name=gpu Type=h100 File=$DIR/dev/nvidia[0-$((GPUS - 1))]"
}

write_cgroup_conf() {
  printf '%s\n' CgroupAutomount=no ConstrainCores=no ConstrainRAMSpace=no ConstrainDevices=no
}

write_my_cnf() { # nothing of it need survive a crash of the machine, so it never waits for the disk
  cat <<CONF
[mysqld]
datadir=$DIR/db
# Its own: a mariadbd that starts removes the temporary tables of others that it finds there, and they die of it.
tmpdir=$DIR/db-tmp
socket=$RUN/mysql.sock
pid-file=$RUN/mariadbd.pid
log-error=$DIR/log/mariadbd.log
user=root
bind-address=127.0.0.1
port=$((PORT + 3))
skip-name-resolve
skip-log-bin
performance_schema=OFF
max_allowed_packet=16M
innodb_buffer_pool_size=128M
innodb_log_file_size=32M
innodb_lock_wait_timeout=900
innodb_flush_log_at_trx_commit=0
innodb_flush_method=nosync
innodb_doublewrite=0
CONF
}

write_slurmdbd_conf() {
  cat <<CONF
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT + 2))
SlurmUser=root
LogFile=$DIR/log/slurmdbd.log
PidFile=$RUN/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 3))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CommitDelay=1
CONF
}

# Everything that up.sh needs in the folder, the database excepted.
configure() { # ADDRESS_OF_SLURMCTLD
  local gpu
  write_slurm_conf "$1" >"$DIR/etc/slurm.conf"
  write_gres_conf >"$DIR/etc/gres.conf"
  write_cgroup_conf >"$DIR/etc/cgroup.conf"
  for ((gpu = 0; gpu < GPUS; gpu++)); do # character devices where we may make them: slurmd then reports real minors
    [ -e "$DIR/dev/nvidia$gpu" ] || mknod "$DIR/dev/nvidia$gpu" c 1 3 2>/dev/null || : >"$DIR/dev/nvidia$gpu"
  done
  if [ "$ACCOUNTING" = dbd ]; then
    write_my_cnf >"$DIR/etc/my.cnf"
    (umask 077 && write_slurmdbd_conf >"$DIR/etc/slurmdbd.conf") # slurmdbd refuses one that others can read
  fi
  [ -s "$DIR/etc/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$DIR/etc/munge.key")
}
