# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_infcl`, the same as the command `paddle-infcl`."""

import sys

from paddle_infcl.cli import main

if __name__ == "__main__":
    sys.exit(main())
