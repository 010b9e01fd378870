#!/bin/sh
# Makes the tree of an example's image from package registries alone; root runs it on Debian or Ubuntu. What is in the tree:
#   EXAMPLE/debian.txt        the Debian release, then its packages
#   EXAMPLE/requirements.txt  packages from PyPI, if it needs some
#   EXAMPLE/setup.sh          which installs them, in the tree
# apt and pip take their servers from this machine's own configuration. MIRROR is for a machine whose apt knows no Debian mirror.
set -eu

[ $# -ge 2 ] || { echo 'usage: build-image.sh EXAMPLE TREE [MIRROR]; then: mksquashfs TREE IMAGE.sqsh' >&2; exit 2; }
example=$(cd "$(dirname "$0")/$1" && pwd)
tree=$2
mirror=${3:-}

{ read -r release; packages=$(paste -sd,); } < "$example/debian.txt"
# Debian testing's indexes expire sooner than mirrors and caches are renewed.
mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' --include="$packages" \
  "$release" "$tree" ${mirror:+"deb $mirror $release main"}

if [ -e "$example/requirements.txt" ]; then
  # This machine's pip downloads, so that the tree needs neither network nor proxy nor certificates. It may belong to another
  # Python: the wheels are those for the tree's.
  python=$(chroot "$tree" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  machine=$(uname -m)
  mkdir "$tree/wheels"
  ${PIP:-python3 -m pip} --quiet download --no-deps --dest "$tree/wheels" --requirement "$example/requirements.txt" \
    --python-version "$python" --platform "manylinux2014_$machine" \
    $(seq -f "--platform=manylinux_2_%g_$machine" 5 36)
  # Debian asks for the option, so that nobody mixes the two on their own machine by mistake.
  chroot "$tree" env PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    sh -eu -s < "$example/setup.sh"
  rm -r "$tree/wheels"
fi
