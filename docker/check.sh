#!/usr/bin/env bash
# Builds the image on a stand-in base and runs compose.yaml with it, on a machine without Docker:
#
#   sudo docker/check.sh [WORK_FOLDER]
#
# It needs buildah, debootstrap, iproute2, util-linux and Python with PyYAML. The base is Debian's
# own Python 3.11 instead of python:3.11-slim; pip is set up in the build as it is on this machine.
# With a folder named, base and image are kept there, and a base that is there is used again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

for tool in buildah debootstrap ip unshare setpriv "$PYTHON"; do
  command -v "$tool" >/dev/null || { echo "docker/check.sh needs $tool" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "docker/check.sh needs root: it makes network namespaces" >&2; exit 2; }

if [ $# -gt 0 ]; then
  work=$(mkdir -p "$1" && cd "$1" && pwd)
else
  work=$(mktemp -d)
fi

said() { printf '%s  %s\n' "$(date -u +%H:%M:%S)" "$*"; }
built() {
  buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"
}

# --- a base that stands in for python:3.11-slim ------------------------------------------------

if [ ! -e "$work/base/.complete" ]; then
  said "making a base from Debian's packages"
  rm -rf "$work/base"
  # The official image has Python's headers too; they are what python3.11-dev is for.
  debootstrap --variant=minbase --include=python3.11-venv,python3.11-dev,python3-distutils,ca-certificates \
    bookworm "$work/base" >"$work/debootstrap.log" 2>&1 || { tail -20 "$work/debootstrap.log"; exit 1; }
  ln -s /usr/bin/python3.11 "$work/base/usr/local/bin/python"
  rm -rf "$work"/base/usr/lib/python3.11/config-*/*.a "$work"/base/var/cache/apt/archives/*.deb \
    "$work"/base/var/cache/apt/*.bin "$work"/base/var/lib/apt/lists/*
  # As in the official image: apt keeps no caches.
  printf '%s\n' 'Dir::Cache::pkgcache "";' 'Dir::Cache::srcpkgcache "";' \
    'Binary::apt::APT::Keep-Downloaded-Packages "false";' \
    >"$work/base/etc/apt/apt.conf.d/docker-clean"
  touch "$work/base/.complete"
fi
if ! built inspect --type image shoal-base >/dev/null 2>&1; then
  container=$(built from scratch)
  built add -q "$container" "$work/base" / >/dev/null
  built config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  built commit -q --rm "$container" shoal-base >/dev/null
fi

# --- pip as it is set up here: its options, and the files and folders that they name -----------

options=$(cd / && "$PYTHON" -m pip config list)
{
  echo "[global]"
  sed -n "s/^[^']*\.\([a-z-]*\)='\(.*\)'\$/\1 = \2/p" <<<"$options" | awk '!seen[$1]++'
} >"$work/pip.conf"
mounts=(--volume "$work/pip.conf:/etc/pip.conf:ro")
while read -r path; do
  case $path in
    file://*) path=$(dirname "${path#file://}") ;;
  esac
  [ ! -e "$path" ] || mounts+=(--volume "$path:$path:ro")
done < <(grep -oE "(file://)?/[^ ']+" "$work/pip.conf" | sort -u)

# --- the image ----------------------------------------------------------------------------------

said "building the image"
# An empty TORCH_INDEX: torch comes from wherever pip finds it on this machine.
built bud --isolation chroot --format docker --build-arg BASE=localhost/shoal-base \
  --build-arg TORCH_INDEX= "${mounts[@]}" -f docker/Dockerfile -t shoal . \
  >"$work/build.log" 2>&1 || { tail -40 "$work/build.log"; exit 1; }

# Prometheus' own image has it as /bin/prometheus, too; Debian's package brings promtool along.
if ! built inspect --type image prometheus >/dev/null 2>&1; then
  said "making an image of Prometheus"
  container=$(built from shoal-base)
  built run --isolation chroot "$container" -- sh -c 'apt-get update -q &&
    apt-get install -q -y --no-install-recommends prometheus &&
    install -d -o nobody -g nogroup /prometheus' >"$work/prometheus.log" 2>&1
  built config --entrypoint '["/bin/prometheus"]' --user nobody "$container"
  built commit -q --format docker --rm "$container" prometheus >/dev/null
fi

for image in shoal prometheus; do
  mkdir -p "$work/images/$image"
  ln -sfn "$(built mount "$(built from --name "run-$image" "$image")")" "$work/images/$image/rootfs"
  built inspect --type image "$image" >"$work/images/$image/config.json"
done
trap 'built rm run-shoal run-prometheus >/dev/null' EXIT
size() { du -sm "$1/." | cut -f1; }
said "image: $(size "$work/images/shoal/rootfs") MB, of which its base $(size "$work/base") MB and" \
  "torch $(size "$work"/images/shoal/rootfs/opt/shoal/lib/python3.11/site-packages/torch) MB"

# --- the files of Prometheus, and what a node exposes -------------------------------------------

promtool() { chroot "$work/images/prometheus/rootfs" promtool "$@"; }
mkdir -p "$work/images/prometheus/rootfs/check"
cp docker/*.yml "$work/images/prometheus/rootfs/check/"
promtool check config /check/prometheus.yml
promtool test rules /check/alerts_test.yml
said "Prometheus' files are right"

# --- compose.yaml, service by service ------------------------------------------------------------

if command -v docker-compose >/dev/null; then
  # Version 1, which Debian packages, does not know the first line.
  grep -v '^name:' docker/compose.yaml >"$work/compose.yaml"
  docker-compose -f "$work/compose.yaml" --profile gpu config -q
  said "docker-compose accepts compose.yaml"
fi
rm -rf "$work/swarm" && mkdir "$work/swarm"
"$PYTHON" docker/run_compose.py "$work/images" "$work/swarm"
