# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_infcl`, the same as the command `paddle-infcl`."""

from paddle_infcl.cli import program

if __name__ == "__main__":
    program()
