# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: a virtual environment in .venv of the checkout, with the extras asked for.
# Usage: . scripts/environment.sh; install_into_venv 'cpu,test'

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3.10 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "paddle_infcl needs Python 3.10, 3.11 or 3.12 (PaddleNLP 3.0.0b4 and Paddle have no packages for others)." >&2
  echo "Found: $(python3 --version 2>&1 || echo 'no python3'). Install one of them, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
  return 1
}

install_into_venv() {
  local extras=$1 python wanted
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || exit 1
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv || { echo "Making a virtual environment failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
  fi
  # Installing again is skipped while the project's metadata is what was installed.
  wanted="$(cksum < pyproject.toml) $(.venv/bin/python --version)"
  if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing paddle_infcl[$extras] into .venv (a few minutes, about 2 GB)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]" || exit 1
    echo "$wanted" > ".venv/installed-$extras"
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}

use_all_of_the_cpu() {
  # Paddle's matrix products come from a version of MKL that takes its slowest path on AMD processors (three times
  # slower for a whole loss: benchmarks/README.md). This variable names the right one; it is left alone where it is set,
  # and on other processors.
  if [ -z "${MKL_DEBUG_CPU_TYPE:-}" ] && grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null; then
    if grep -q avx512f /proc/cpuinfo; then export MKL_DEBUG_CPU_TYPE=7; else export MKL_DEBUG_CPU_TYPE=5; fi
  fi
}
