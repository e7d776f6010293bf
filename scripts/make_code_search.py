# SPDX-License-Identifier: Apache-2.0
"""Makes the code-search set; see docs/data.md."""

from paddle_infcl.data.code_search import main

if __name__ == "__main__":
    main()
