#!/bin/bash
# A real SLURM cluster of three virtual nodes n1, n2, n3 on this one machine, all of it under one directory.
#   cluster.sh up DIR            starts it; then `export SLURM_CONF=DIR/slurm.conf`
#   cluster.sh down DIR          cancels the jobs and stops everything; the logs stay in DIR/log
#   cluster.sh crash DIR NODE    what a node does that loses power: its daemon and all its processes go at once
#   cluster.sh revive DIR NODE   starts it again
# Needs root (for namespaces) and: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
# OWNER_PID=pid: when that process is gone, the cluster takes itself down.
#
# Every node's slurmd lives in an own UTS and mount namespace: `hostname` says n2 there, the names n1 to n3 resolve without
# touching the machine's /etc/hosts, and /dev/shm is the node's own. (No PID namespaces: MPI libraries put process ids into
# the names of shared files.) TmpFS has to differ between nodes, as they share one /tmp.
set -euo pipefail
self=$(realpath "$0") command=${1:?up, down, crash or revive} dir=$(realpath -m "${2:?directory}") node=${3:-}
freezer=/sys/fs/cgroup/freezer
nodes=(n1 n2 n3)
export SLURM_CONF=$dir/slurm.conf PATH=$PATH:/usr/sbin:/sbin

free_ports() {  # as many as asked for, below the ephemeral range, so that no client's socket takes one in between
  python3 - "$1" <<'PY'
import random, socket, sys
free = set()
while len(free) < int(sys.argv[1]):
    port = random.randrange(20000, 32000)
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            continue
    free.add(port)
print(*free)
PY
}

write_configuration() {
  local ports track=linuxproc i
  # The cgroup tracker finds processes that left their session, and signals only what a real cluster would.
  if [ -w $freezer/cgroup.procs ]; then track=cgroup; fi
  if [ -e $freezer/slurm_n1 ]; then echo "$freezer/slurm_n1 exists: is another such cluster up?" >&2; exit 2; fi
  read -ra ports <<<"$(free_ports 4)"
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=${ports[3]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/$track
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
KillWait=5
SlurmdTimeout=10
UnkillableStepTimeout=30
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
CONF
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupAutomount=no >"$dir/cgroup.conf"
  cp /etc/hosts "$dir/hosts"
  for i in "${!nodes[@]}"; do
    mkdir -p "$dir/tmp/${nodes[i]}"
    echo "127.0.0.1 ${nodes[i]}" >>"$dir/hosts"
    echo "NodeName=${nodes[i]} NodeHostname=${nodes[i]} NodeAddr=127.0.0.1 Port=${ports[i]} CPUs=8 State=UNKNOWN" >>"$SLURM_CONF"
  done
}

start() {  # start NAME COMMAND...: in the background, its process id noted
  local name=$1
  shift
  setsid "$@" </dev/null >"$dir/log/$name.out" 2>&1 &
  echo "$name $!" >>"$dir/run/pids"
}

start_node() {
  start "slurmd-$1" unshare --uts --mount bash -c '
    hostname "$1"
    readlink /proc/self/ns/uts >"$2/run/uts-$1"
    mount --bind "$2/hosts" /etc/hosts
    mount -t tmpfs -o mode=1777 shm /dev/shm
    exec slurmd -D -N "$1" -f "$2/slurm.conf"' _ "$1" "$dir"
}

up() {
  local i
  [ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 2; }
  [ ${#dir} -le 60 ] || { echo "path too long for the names of sockets: $dir" >&2; exit 2; }
  mkdir -p "$dir"/{run,state,spool,log}
  chmod 755 "$dir"
  write_configuration
  : >"$dir/run/pids"
  (umask 077; head -c 1024 /dev/urandom >"$dir/munge.key")
  # --force: the directory above may be private, as mktemp makes it.
  start munged munged -F --force -S "$dir/run/munge.sock" --key-file="$dir/munge.key" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/state/munge.seed"
  for ((i = 0; i < 100; i++)); do [ ! -S "$dir/run/munge.sock" ] || break; sleep 0.1; done
  start slurmctld slurmctld -D -c -f "$SLURM_CONF"
  for i in "${nodes[@]}"; do start_node "$i"; done
  for ((i = 0; i < 600; i++)); do                    # a minute, for a machine that has other things to do
    [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" -lt ${#nodes[@]} ] || break
    sleep 0.1
  done
  if [ $i = 600 ]; then
    echo "the nodes did not become idle" >&2
    tail -n 20 "$dir"/log/* >&2
    down
    exit 1
  fi
  if [ -n "${OWNER_PID:-}" ]; then
    setsid bash -c 'while [ -d "/proc/$1" ] && [ -f "$3/run/pids" ]; do sleep 1; done; exec bash "$2" down "$3"' \
      _ "$OWNER_PID" "$self" "$dir" </dev/null >"$dir/log/owner.out" 2>&1 &
  fi
}

alive() {  # a zombie is not alive: in a container nobody may reap it
  local state
  state=$(ps -o stat= -p "$1" 2>/dev/null) && [[ -n $state && $state != Z* ]]
}

kill_node() {  # all processes of the node: those of its UTS namespace that know this cluster, then what its cgroup holds
  local process uts group=$freezer/slurm_$1 i
  uts=$(cat "$dir/run/uts-$1" 2>/dev/null) || return 0
  for process in /proc/[0-9]*; do
    if [ "$(readlink "$process/ns/uts" 2>/dev/null)" = "$uts" ] && grep -qz "^SLURM_CONF=$SLURM_CONF\$" "$process/environ" 2>/dev/null
    then kill -9 "${process#/proc/}" 2>/dev/null || true; fi
  done
  rm -f "$dir/run/uts-$1"
  grep -q '^ProctrackType=proctrack/cgroup' "$SLURM_CONF" || return 0
  for ((i = 0; i < 10; i++)); do
    [ -d "$group" ] || break
    find "$group" -name cgroup.procs -exec cat {} + 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    sleep 0.1
  done
}

any_alive() {
  local name pid
  while read -r name pid; do ! alive "$pid" || return 0; done <"$dir/run/pids"
  return 1
}

down() {
  local name pid i
  [ -f "$dir/run/pids" ] || return 0
  timeout 5 scancel -u root 2>/dev/null || true
  for ((i = 0; i < 80; i++)); do [ -n "$(timeout 5 squeue -h -o %i 2>/dev/null)" ] || break; sleep 0.1; done
  while read -r name pid; do ! alive "$pid" || kill "$pid" 2>/dev/null || true; done < <(tac "$dir/run/pids")
  for ((i = 0; i < 50; i++)); do any_alive || break; sleep 0.1; done
  while read -r name pid; do ! alive "$pid" || kill -9 "$pid" 2>/dev/null || true; done <"$dir/run/pids"
  for i in "${nodes[@]}"; do kill_node "$i"; done
  rm -f "$dir/run/pids"
}

case $command in
  up) up ;;
  down) down ;;
  crash) kill_node "$node" ;;
  revive) start_node "$node" ;;
  *) echo "up, down, crash or revive" >&2; exit 2 ;;
esac
