# shellcheck shell=bash
# Fetch packages of a Debian suite and unpack them into a directory: no root, nothing is installed.
#
# What is sourced by scripts that unpack one thing each (slurm-from-debian is one). The packages and
# every library they need, libc included, come from the Debian mirror that this machine uses already,
# checked by apt against the signatures of Debian. Programs are pointed at these libraries (ELF
# interpreter and rpath) without LD_LIBRARY_PATH, so what they start still runs on this system's own.
# In this order: claim_directory, fetch_packages, unpack_packages, patch, complete_directory.
# Exit codes: 69 (EX_UNAVAILABLE of sysexits.h) without a network, 1 anything else.

say() { echo "== $*" >&2; }
fail() { echo "error: $1" >&2; [ -z "${2-}" ] || echo "hint: $2" >&2; exit 1; }
# The comment at the head of the script that was started.
print_usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; }

# claim_directory DIRECTORY STAMP: make it, keep others out until this shell ends, and empty it.
# Sets `directory` and `stamp`. False if what STAMP describes is there already.
claim_directory() {
    local tool
    for tool in apt-get dpkg-deb tar; do
        command -v "$tool" >/dev/null || fail "$tool is missing: this works on Debian only"
    done
    mkdir -p "$1"
    directory=$(realpath "$1")
    # What was unpacked before is removed below, so nothing else may be in there.
    if [ ! -e "$directory/lock" ] && [ -n "$(ls -A "$directory")" ]; then
        fail "$directory is not empty" "choose a new directory"
    fi
    # One at a time: tests that run side by side share the result.
    exec 9>"$directory/lock"
    flock 9
    stamp="$2 $(dpkg --print-architecture) $directory"
    [ "$(cat "$directory/complete" 2>/dev/null)" != "$stamp" ] || return 1
    local name
    for name in complete bin plugins root apt; do rm -rf "${directory:?}/$name"; done
}

# -- apt with other suites and an empty package database, so that libc counts as missing, too ------

other_apt() {
    apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/parts" \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" \
        -o Dir::State::extended_states="$apt/extended_states" \
        -o Dir::Cache::archives="$apt/archives" -o Dir::Cache::pkgcache="" \
        -o Dir::Cache::srcpkgcache="" -o Dir::Log="$apt" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=3 \
        -o Acquire::AllowInsecureRepositories=false -o APT::Get::AllowUnauthenticated=false \
        -o Acquire::http::Timeout=30 -o APT::Update::Error-Mode=any "$@"
}
# What apt says of a mirror that nobody answers for; see apt's methods/connect.cc.
offline='Temporary failure resolving|Could not resolve|Could not connect|Unable to connect'
offline="$offline|Cannot initiate the connection|Network is unreachable|onnection timed out"
apt_failed() {
    grep -qE "$offline" "$apt/log" || fail "$1: $(tail -3 "$apt/log")"
    echo "error: $mirror cannot be reached: $(grep -E "$offline" "$apt/log" | tail -1)" >&2
    exit 69
}

# fetch_packages "SUITE..." PACKAGE...: download them and all they need. The first suite counts; of
# the others come packages that are named with them, as in libmariadb3/bookworm. Sets `apt`.
fetch_packages() {
    apt=$directory/apt
    mkdir -p "$apt"/lists/partial "$apt"/archives/partial "$apt"/parts
    # shellcheck disable=SC2016  # apt-get replaces these names
    mirror=$(apt-get indextargets --format '$(LABEL)|$(COMPONENT)|$(REPO_URI)' \
        'Created-By: Packages' | awk -F'|' '$1 == "Debian" && $2 == "main" { print $3; exit }')
    [ -n "$mirror" ] || fail "apt knows no Debian mirror here" "try: apt-get update"
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg suite
    [ -r $keyring ] || fail "$keyring is missing: nothing could be verified" \
        "install the package debian-archive-keyring"
    for suite in $1; do
        echo "deb [signed-by=$keyring] $mirror $suite main" >>"$apt/parts/suite.list"
    done
    suite=${1%% *}
    shift
    : >"$apt/status"
    # Its words and those of apt are wanted only when something went wrong.
    say "fetching the packages of $suite from $mirror"
    other_apt update >"$apt/log" 2>&1 || apt_failed "apt-get update of $suite"
    # patchelf is used here and not kept; systemd-standalone-sysusers keeps all of systemd out.
    other_apt install -y --no-install-recommends --download-only "$@" patchelf \
        systemd-standalone-sysusers >"$apt/log" 2>&1 ||
        apt_failed "apt-get could not fetch the packages of $suite"
}

# Sets `root`, and `libraries` and `loader` in it: the directory of libc, and its dynamic loader.
unpack_packages() {
    local name deb
    root=$directory/root
    say "unpacking"
    # As base-files would make it: some packages bring their files as /lib, others as /usr/lib.
    for name in bin sbin lib lib64; do
        mkdir -p "$root/usr/$name" && ln -s "usr/$name" "$root/$name"
    done
    for deb in "$apt"/archives/*.deb; do
        # Not dpkg -x, which would replace these links by directories.
        dpkg-deb --fsys-tarfile "$deb" | tar -C "$root" -x --keep-directory-symlink \
            --no-same-owner --exclude=./usr/share/doc --exclude=./usr/share/man \
            --exclude=./usr/share/locale
    done
    libraries=$(dirname "$(find "$root/usr/lib" -name libc.so.6 -print -quit)")
    loader=$(find "$root/usr/lib64" "$root/usr/lib" -name 'ld-linux*.so.*' -print -quit)
    [ -n "$loader" ] || fail "the packages are laid out in another way"
}

is_elf() { [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 4 "$1" | tail -c 3)" = ELF ]; }
# patch RPATH OPTION... FILE: OPTION is one of patchelf, which is not patched itself.
patch() {
    local rpath=$1
    shift
    "$loader" --library-path "$libraries" "$root/usr/bin/patchelf" --force-rpath \
        --set-rpath "$rpath" "$@"
}
# The programs of a package, as paths below usr.
programs_of() {
    dpkg-deb --fsys-tarfile "$apt/archives/$1"_*.deb | tar -t |
        sed -n 's#^\./\(usr/\)\?\(s\?bin/.*[^/]\)$#\2#p'
}

# complete_directory: from now on claim_directory finds it.
complete_directory() {
    rm -rf "$apt"
    echo "$stamp" >"$directory/complete"
}
