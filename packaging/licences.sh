#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# licences.sh CRATES PACKAGE
#
# Prints which crates of the directory CRATES are built into PACKAGE, a package of this workspace, with their licences.
set -eu
crates=$1 package=$2
echo "$package has these crates in it, under one of the licences that each names."
cargo tree --locked --offline --package "$package" --edges normal,no-proc-macro --target "$(rustc -vV | sed -n 's/^host: //p')" \
    --prefix none --format '{p}|{l}' |
    sed 's/ (\*)$//' | grep -v ' (/' | sort -u |
    while IFS='|' read -r crate licence; do
        name=${crate%% *} version=${crate#* v}
        directory=$crates/$name-$version
        printf '\n%s\n%s %s: %s\n' ------------------------------------------------------------ "$name" "$version" "$licence"
        for file in "$directory"/LICEN[CS]E* "$directory"/COPYING* "$directory"/NOTICE*; do
            if [ -f "$file" ]; then
                printf '\n%s:\n\n' "${file##*/}"
                cat "$file"
            fi
        done
    done
