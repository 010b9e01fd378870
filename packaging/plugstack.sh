#!/bin/sh
# Puts mizzen's line into Slurm's plugstack.conf, and takes it out again. Root runs this when a package is installed or
# removed, and in `make uninstall`.
#
# On a machine whose plugstack.conf names a file that is missing, Slurm fails every job, with or without a container. So the
# line comes after the file and goes before it. That is why the file with the line is not left to dpkg, which
# keeps configuration when it removes a package.
set -eu

plugin=@PREFIX@/lib/mizzen/spank_mizzen.so
pristine=${DESTDIR:-}@PREFIX@/share/mizzen/plugstack.conf
slurm=${DESTDIR:-}@SYSCONFDIR@/slurm
line=$slurm/plugstack.conf.d/mizzen.conf
pattern="^[[:space:]]*(required|optional)[[:space:]]+$plugin([[:space:]]|\$)"
include='include @SYSCONFDIR@/slurm/plugstack.conf.d/*.conf'

usage() {
    echo "usage: ${0##*/} enable|disable" >&2
    exit 2
}

say() {
    printf 'mizzen: %s\n' "$@" >&2
}

# One directory for many machines, all of which then read the line, whether they have the plugin or not.
is_shared() {
    [ "$(stat -c %d "$slurm/")" != "$(stat -c %d "${slurm%/*}/")" ]
}

# Makes a file beside the one that it will replace. A link under a name that can be foreseen could lead anywhere.
make_new() {
    new=$(mktemp "$1.XXXXXXXXXX")
    trap 'rm -f "$new"' EXIT
}

# Puts it there.
replace() {
    chmod 644 "$new"
    mv -T "$new" "$1"
}

enable() {
    if [ -e "$line" ]; then
        return
    fi
    if is_shared; then
        say "$slurm is on a file system of its own, so other machines may read it: nothing in it was changed" \
            "once every node has mizzen, add this line to plugstack.conf: required $plugin"
        return
    fi
    mkdir -p "${line%/*}"
    make_new "$line"
    if [ -e "$line.removed" ]; then
        # What was kept may lack the line: an administrator, or Ansible, has taken it out before the package went.
        sed -e '$a\' "$line.removed" > "$new"
        grep -Eq "$pattern" "$new" || grep -E "$pattern" "$pristine" >> "$new"
    else
        cp "$pristine" "$new"
    fi
    replace "$line"
    rm -f "$line.removed"
    include_the_line
    if [ ! -e "$slurm/slurm.conf" ]; then
        say "there is no $slurm/slurm.conf; where Slurm's configuration is elsewhere, or comes from slurmctld, add this line to" \
            "the plugstack.conf that Slurm reads, once every node has mizzen: required $plugin"
    fi
}

include_the_line() {
    plugstack=$slurm/plugstack.conf
    if [ -e "$plugstack" ]; then
        if ! grep -Eiq '^[[:space:]]*include[[:space:]].*plugstack\.conf\.d/' "$plugstack"; then
            say "$plugstack does not include $line; add this line to it: $include"
        fi
    elif dpkg-query --search "$plugstack" >/dev/null 2>&1; then
        say "$plugstack, which Slurm's package brings, was removed here; make it again with this line: $include"
    else
        # The text of Debian's package of Slurm, to the letter, so that dpkg has nothing to ask when that is installed later.
        make_new "$plugstack"
        printf '%s\n' "$include" > "$new"
        replace "$plugstack"
        say "made $plugstack, which includes $line"
    fi
}

disable() {
    left=$(lines_elsewhere)
    if [ -n "$left" ]; then
        say "without the plugin, Slurm would fail every job here while this is in its configuration; remove it first:" "$left"
        exit 1
    fi
    if [ -e "$line" ]; then
        mv -T "$line" "$line.removed"
        sleep 1 # for a step that has just read the line and loads the file now
    fi
}

# Lines with the plugin that only the administrator can remove.
lines_elsewhere() {
    named=
    if [ -r "$slurm/slurm.conf" ]; then
        named=$(sed -n 's/^[[:space:]]*PlugStackConfig[[:space:]]*=[[:space:]]*\([^[:space:]]*\).*/\1/Ip' "$slurm/slurm.conf")
    fi
    for file in "$slurm/plugstack.conf" "$slurm"/plugstack.conf.d/*.conf /run/slurm/conf/plugstack.conf "$named"; do
        if [ ! -r "$file" ] || { [ "$file" = "$line" ] && ! is_shared; }; then
            continue
        fi
        grep -EH "$pattern" "$file" || true
    done
}

if [ $# -ne 1 ]; then
    usage
fi
case $1 in
enable) enable ;;
disable) disable ;;
*) usage ;;
esac
