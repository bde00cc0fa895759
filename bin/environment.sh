# Sourced by bin/peer and bin/test with PEER_ROOT set: is .venv up to date, and which Python makes it.

# The installed state is named by the checksum of the files that describe it.
make_environment() { # base or test
    key=$(cat "$PEER_ROOT/setup.cfg" "$PEER_ROOT/constraints.txt" | cksum)
    stamp=$PEER_ROOT/.venv/stamp.$1
    if [ -x "$PEER_ROOT/.venv/bin/python" ] && [ -r "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return
    fi
    find_python
    "$python" "$PEER_ROOT/bin/environment.py" "$1" "$key"
}

find_python() {
    for python in ${PEER_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            return
        fi
    done
    echo "peer: no Python 3.10 to 3.13 found (tried: ${PEER_PYTHON:-python3, python3.10 to python3.13})." >&2
    echo "peer: install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PEER_PYTHON=/path/to/python3.12" >&2
    exit 1
}

# Like `python -m MODULE`, but never imports from the current folder, which may well hold another package `models`.
run_module() { # MODULE ARGUMENTS...
    PYTHONPATH=$PEER_ROOT${PYTHONPATH:+:$PYTHONPATH}
    PYTHONSAFEPATH=1
    # Threads that spin while they wait make a busy machine many times slower: torch's must sleep.
    OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    # Fewer arenas: what the training thread frees is used again by the others (some 25 MB less a peer).
    MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-1}
    export PYTHONPATH PYTHONSAFEPATH OMP_WAIT_POLICY MALLOC_ARENA_MAX
    exec "$PEER_ROOT/.venv/bin/python" -c \
        'import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)' \
        "$@"
}
