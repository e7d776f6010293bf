# SPDX-License-Identifier: Apache-2.0
"""Makes the WordNet set; see docs/data.md."""

from paddle_infcl.data.wordnet import main

if __name__ == "__main__":
    main()
