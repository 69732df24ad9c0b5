#!/usr/bin/env bash
# install.sh: Slurm with accounting, from Debian's packages; does nothing where it is there already.
# Exit 3, with the packages named, where installing is not ours to do.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
packages=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server)

missing=()
for command in slurmctld slurmd sbatch slurmdbd munged mariadbd mariadb-install-db; do
  command -v "$command" >/dev/null || missing+=("$command")
done
((${#missing[@]})) || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Slurm is missing (${missing[*]}). On Debian, as root: apt-get install ${packages[*]}" >&2
  exit 3
fi
echo "  apt-get install ${packages[*]}"
# The packages' scripts start their services where an init system is found; the test clusters want none of them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  rm -f "$log"
  exit 1
fi
rm -f "$log"
