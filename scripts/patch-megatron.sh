#!/usr/bin/env bash
# Patch a fork of Megatron-LM so that it loads megatron-ft by itself, or take the patch back.
#
#   scripts/patch-megatron.sh apply|check|reverse DIRECTORY
#
# DIRECTORY holds the fork's megatron/ folder.  Exit status: 0 if the patch is as wanted
# (check: applied), 1 if check finds that it is not applied but would fit, 2 if it does not
# fit, there is none for this release, or the call is wrong.  A patch that does not fit
# changes nothing.
set -euo pipefail

PATCHES="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd -P)"

# fail MESSAGE...: one line per argument to stderr, then exit 2.
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 2
}

# release_of FOLDER: the release that the checkout says it is, as 0.19.
release_of() {
    local info="$1/megatron/core/package_info.py"
    [ -f "$info" ] || fail "$1 is no checkout of Megatron-LM: there is no $info"
    sed -n 's/^MAJOR *= *//p; s/^MINOR *= *//p' "$info" | paste -s -d .
}

# known_releases: those that there are patches for, on one line.
known_releases() {
    local path
    for path in "$PATCHES"/megatron-lm-*.patch; do
        basename "$path" .patch | cut -d - -f 3
    done | paste -s -d ' '
}

# git_apply FLAG...: git apply with the patch, in the folder.  A repository around the folder is
# not looked for: git would take the patch's paths as of its root, and silently skip all files.
git_apply() {
    GIT_CEILING_DIRECTORIES="$(dirname "$folder")" git -C "$folder" apply "$@" "$patch"
}

if [ $# -ne 2 ] || ! [[ "$1" =~ ^(apply|check|reverse)$ ]]; then
    fail "usage: ${0##*/} apply|check|reverse DIRECTORY"
fi
[ -d "$2" ] || fail "there is no folder $2"
command -v git >/dev/null || fail "no command git, which applies the patch"
verb="$1"
folder="$(cd "$2" && pwd -P)"
release="$(release_of "$folder")"
patch="$(find "$PATCHES" -name "megatron-lm-$release.patch" -o -name "megatron-lm-$release-*.patch")"
if [ -z "$patch" ]; then
    fail "no patch for Megatron-LM $release, only for $(known_releases)" \
        "megatron-ft run hooks an unpatched pretraining script as well"
fi

name="${patch##*/}"
if git_apply --reverse --check 2>/dev/null; then
    state=applied
elif git_apply --check 2>/dev/null; then
    state=absent
else
    git_apply --check || true # git says where
    fail "$name does not fit Megatron-LM $release in $folder, which stays as it was" \
        "add the patch's lines by hand, or call megatron_ft.megatron.install() in your script"
fi

case "$verb-$state" in
apply-absent)
    git_apply
    echo "applied $name to $folder"
    ;;
reverse-applied)
    git_apply --reverse
    echo "took $name back from $folder"
    ;;
*-applied) echo "$name is applied to $folder" ;;
*-absent) echo "$name is not applied to $folder; it fits" ;;
esac
[ "$verb-$state" != check-absent ] || exit 1
