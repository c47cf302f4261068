# Sourced by scripts that keep virtual environments in the user's cache folder.

. "$(dirname "${BASH_SOURCE[0]}")/going-on.sh"
venvs="${XDG_CACHE_HOME:-$HOME/.cache}/bytesched/venvs"

# tag_of PYTHON: what environments of two Pythons must not have in common.
tag_of() {
  "$1" -c 'import platform, sys
print(f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}")'
}

# keep_venv FOLDER LABEL MAKE [HINT]: runs MAKE, a function that fills FOLDER, unless that is complete.
# One process at a time does. Ends the script if MAKE fails. Not to be called in an `if`.
keep_venv() {
  local kept="$1" label="$2" make="$3" hint="${4:-}" code
  [ ! -e "$kept/complete" ] || return 0
  mkdir -p "$(dirname "$kept")"
  exec 9>"$kept.lock"
  if ! flock --nonblock 9; then
    echo "$label: another one does that: waiting for it" >&2
    flock 9
  fi
  if [ ! -e "$kept/complete" ]; then
    rm -rf "$kept"
    set +e # not in an `if`, in which bash goes on after an error
    going_on "$kept.log" "$label" "$make"
    code="$?"
    set -e
    if [ "$code" -ne 0 ]; then
      [ -z "$hint" ] || echo "$hint" >&2
      tail -n 5 "$kept.log" >&2
      rm -rf "$kept"
      exit 1
    fi
    touch "$kept/complete"
  fi
  exec 9>&-
}
