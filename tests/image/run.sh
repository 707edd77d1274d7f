#!/usr/bin/env bash
# Builds the image with CPU wheels and runs its tests: tests/image/run.sh [pytest arguments]
# With docker where an engine answers. Elsewhere, as root on Debian, with buildah and podman; their storage and a base
# image made of Debian's packages (there, no container registry is needed) are kept in $IMAGE_TEST_DIR.
set -euo pipefail
cd "$(dirname "$0")/../.."
export KVREUSE_IMAGE=localhost/kvreuse:test KVREUSE_ENGINE=docker
build=(--build-arg TORCH=cpu -t "$KVREUSE_IMAGE" .)

use_podman() {
  export KVREUSE_ENGINE=podman
  work=${IMAGE_TEST_DIR:-/var/tmp/kvreuse-image}
  base=localhost/base:bookworm
  mkdir -p "$work"
  export CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_CONF=$work/containers.conf TMPDIR=$work
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "/run/kvreuse-image"\n' "$work/storage" >"$work/storage.conf"
  # A container in a container may neither raise limits nor make control groups.
  cat >"$work/containers.conf" <<END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4096:4096"]
cgroups = "disabled"
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
END
}

make_base() {
  mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3-venv,usr-is-merged \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --customize-hook='chroot "$1" apt-get purge -qq usrmerge perl-modules-5.36 >/dev/null' \
    --customize-hook='chroot "$1" python3 -m venv /usr/local' bookworm "$work/base.tar"
  podman import --quiet --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' "$work/base.tar" "$base"
  rm "$work/base.tar"
}

# The build sees the host's settings of pip, with the files they name at the same places; none of it stays in the image.
pip_settings() {
  .venv/bin/pip config list | sed -n "s/^[^.]*\.\([a-z-]*\)='\(.*\)'$/\1 = \2/p" | sed 's/^default-//' |
    tac | awk '!seen[$1]++' >"$work/pip.list"
  { echo '[global]'; grep -v '^retries' "$work/pip.list" || true; echo 'retries = 1'; } >"$work/pip.conf"
  mounts=(-v "$work/pip.conf:/etc/pip.conf:ro")
  # An index in a folder names files beside that folder.
  for path in $(grep -oE '(file:/)?/[^ ]+' "$work/pip.list" | sed -E 's,^file://(.*)/[^/]+/?$,\1,' | sort -u); do
    if [ -e "$path" ]; then mounts+=(-v "$path:$path:ro"); fi
  done
}

if docker info >/dev/null 2>&1; then
  docker build "${build[@]}"
else
  # crun refuses a mixture of both versions of control groups: hide one, from this script only.
  if [ -z "${KVREUSE_UNSHARED:-}" ] && mountpoint -q /sys/fs/cgroup/unified; then
    KVREUSE_UNSHARED=1 exec unshare -m --propagation private \
      sh -c 'umount /sys/fs/cgroup/unified && exec "$@"' sh "tests/image/run.sh" "$@"
  fi
  use_podman
  podman image exists "$base" || make_base
  pip_settings
  from=$(sed -n 's/^FROM \(.*@sha256:[0-9a-f]*\) AS base$/\1/p' Dockerfile)
  SECONDS=0
  buildah bud --format docker --layers --isolation chroot --pull-never --network host \
    --build-context "$from=container-image://$base" "${mounts[@]}" "${build[@]}"
  echo "built in $SECONDS s"
fi
exec .venv/bin/pytest -q -p no:cacheprovider tests/image "$@"
