#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs into .venv and runs lint, format and all tests with coverage. Arguments go to pytest instead of the defaults.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_into_venv cpu,test
use_all_of_the_cpu

ruff check .
ruff format --check .
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
exec python -m pytest -n 2 --dist loadgroup --cov=paddle_infcl --cov-report=term --cov-fail-under=90 -q
