#!/usr/bin/env bash
# A SLURM cluster of one node with two stand-in GPUs, on this machine's loopback: to try the workflow, or for its tests.
#
#   cluster.sh install          Debian's packages (as root)
#   cluster.sh start DIR        start it, all its files in DIR; prints what to set in the shell
#   cluster.sh stop DIR
#
# It needs root, and neither systemd, cgroups nor slurmdbd. The stand-ins are null devices: jobs get CUDA_VISIBLE_DEVICES
# as from real GPUs, and find no CUDA there.
set -Eeuo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "cluster.sh: $*" >&2; exit 1; }

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

install() {
  command -v slurmctld slurmd munged srun sbatch >/dev/null && return
  command -v apt-get >/dev/null || fail "no apt-get: install slurmctld, slurmd, slurm-client and munge by hand"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; } >&2 \
    || fail "the packages could not be installed"
}

start() {
  local dir=$1 host cpus
  for program in slurmctld slurmd munged; do command -v $program >/dev/null || fail "$program is absent: cluster.sh install"; done
  [ "$(id -u)" = 0 ] || fail "slurmd has to be started by root"
  [ ! -e "$dir/slurm.conf" ] || fail "$dir holds a cluster already: stop it, or name another folder"
  mkdir -p "$dir"
  dir=$(cd "$dir" && pwd)
  case $dir in *[[:space:]]*) fail "SLURM takes no folder with spaces in its path: $dir" ;; esac
  mkdir -p "$dir"/{state,spool,bin,log}
  trap 'stop "$dir"; fail "the cluster did not start"' ERR
  host=$(hostname -s)
  cpus=$(($(nproc --all) * 4)) # more than there are: jobs of the tests wait more than they compute

  # munge asks that nobody else can write to the folder of its socket, nor to those above it
  local munge
  munge=$(mktemp -d /run/cellica-munge.XXXXXX)
  chmod 755 "$munge"
  echo "$munge" > "$dir/munge"
  dd if=/dev/urandom of="$munge/key" bs=1024 count=1 status=none
  chmod 400 "$munge/key"
  munged --force --socket="$munge/socket" --key-file="$munge/key" --pid-file="$munge/pid" \
    --seed-file="$munge/seed" --log-file="$munge/log"

  for i in 0 1; do mknod -m 666 "$dir/gpu$i" c 1 3; done
  cat > "$dir/slurm.conf" <<END
ClusterName=cellica$$
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
AuthType=auth/munge
AuthInfo=socket=$munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=86400
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=$((cpus < 8 ? 8 : cpus)) RealMemory=100000 Gres=gpu:2 State=UNKNOWN
PartitionName=gpu Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
  echo "Name=gpu File=$dir/gpu[0-1]" > "$dir/gres.conf"

  # a job's environment has no SLURM_CONF, and its srun would look in /etc/slurm
  printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$dir/slurm.conf" "$(command -v srun)" > "$dir/bin/srun"
  chmod +x "$dir/bin/srun"

  export SLURM_CONF="$dir/slurm.conf"
  slurmctld
  slurmd -N "$host"
  for _ in $(seq 100); do
    if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then
      trap - ERR
      echo "export SLURM_CONF='$dir/slurm.conf' PATH='$dir/bin':\"\$PATH\""
      return
    fi
    sleep 0.2
  done
  sinfo >&2 || true
  tail -n 20 "$dir"/log/* >&2
  false # the node did not come up
}

stop() {
  local dir munge cluster
  [ -e "$1/slurm.conf" ] || fail "$1 holds no cluster"
  dir=$(cd "$1" && pwd)
  munge=$(cat "$dir/munge" 2>/dev/null || true)
  export SLURM_CONF="$dir/slurm.conf"
  scancel --user=root 2>/dev/null || true
  for _ in $(seq 50); do [ -n "$(squeue -h 2>/dev/null)" ] || break; sleep 0.2; done
  for pid in "$dir/slurmd.pid" "$dir/slurmctld.pid" ${munge:+"$munge/pid"}; do
    [ -s "$pid" ] || continue
    kill "$(cat "$pid")" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$(cat "$pid" 2>/dev/null)" 2>/dev/null || break; sleep 0.2; done
  done
  cluster=$(sed -n 's/^ClusterName=//p' "$dir/slurm.conf")
  for job in $(grep -lsz "^SLURM_CLUSTER_NAME=$cluster\$" /proc/[0-9]*/environ | cut -d/ -f3); do kill -9 "$job" 2>/dev/null || true; done
  rm -rf ${munge:+"$munge"} "$dir"/{slurm.conf,gres.conf,munge,state,spool,bin,gpu0,gpu1}
}

case "${1:-} $#" in
  "install 1") install ;;
  "start 2") start "$2" ;;
  "stop 2") stop "$2" ;;
  *) usage ;;
esac
