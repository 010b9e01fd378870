#!/bin/sh
# put.sh TREE put|tell: brings the files of a tree to the same places below /, as `make install` does: each by rename, so steps that run
# keep the old ones, and no step finds half of one. Prints the files that differ from those that are there; `tell` does no more.
# Run by: root on the node.
set -eu
tree=$1 what=$2
cd "$tree"

is_same() {
    if [ -L "$1" ] || [ -L "/$1" ]; then
        [ -L "$1" ] && [ -L "/$1" ] && [ "$(readlink "$1")" = "$(readlink "/$1")" ]
    else
        cmp -s "$1" "/$1" && [ "$(stat -c '%a %u %g' "$1")" = "$(stat -c '%a %u %g' "/$1")" ]
    fi
}

# Directories that are there stay as they are.
if [ "$what" = put ]; then
    find . -mindepth 1 -type d | while read -r directory; do
        [ -d "/$directory" ] || install -d -m "$(stat -c %a "$directory")" "/$directory"
    done
fi

find . ! -type d | while read -r file; do
    if is_same "$file"; then
        continue
    fi
    echo "${file#./}"
    if [ "$what" = put ]; then
        cp -dp --remove-destination "$file" "/$file.new"
        mv -T "/$file.new" "/$file"
    fi
done
