# SPDX-License-Identifier: Apache-2.0
"""What the commands of `paddle-infcl` do, one module each."""
