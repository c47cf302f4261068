# Sourced by scripts that set something up: a step of more than a few seconds shows that it goes on.

# going_on LOG LABEL COMMAND...: runs COMMAND with its output in LOG, and returns its code. On stderr
# stands LABEL with the time so far: one line that counts on a terminal, a line now and then elsewhere.
# To be called in an `if`, or under `set +e`.
going_on() {
  local log="$1" label="$2" began="$SECONDS" code ticker
  shift 2
  [ -t 2 ] || echo "$label" >&2
  _count_up "$label" >/dev/null 9>&- & # neither an output nor a lock of the script's stays open for it
  ticker="$!"
  "$@" >"$log" 2>&1 </dev/null
  code="$?"
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  [ ! -t 2 ] || printf '\r\033[K' >&2
  if [ "$code" -ne 0 ]; then
    echo "$label: failed after $((SECONDS - began)) s; log: $log" >&2
  elif [ -t 2 ] || [ "$((SECONDS - began))" -ge 10 ]; then
    echo "$label: done in $((SECONDS - began)) s" >&2
  fi
  return "$code"
}

_count_up() {
  local label="$1" began="$SECONDS" pause pace=10
  trap 'kill "$pause" 2>/dev/null; exit 0' TERM
  [ ! -t 2 ] || pace=1
  while kill -0 "$$" 2>/dev/null; do
    if [ -t 2 ]; then
      printf '\r\033[K%s ... %d s' "$label" "$((SECONDS - began))" >&2
    elif [ "$SECONDS" -gt "$began" ]; then
      echo "$label ... $((SECONDS - began)) s" >&2
    fi
    sleep "$pace" &
    pause="$!"
    wait "$pause"
  done
}
