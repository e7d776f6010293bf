# SPDX-License-Identifier: Apache-2.0
"""Makes the Gene Ontology set; see docs/data.md."""

from paddle_infcl.data.gene_ontology import main

if __name__ == "__main__":
    main()
