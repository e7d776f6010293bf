# SPDX-License-Identifier: Apache-2.0
"""Installation. The metadata is in pyproject.toml; this file serves `python setup.py` users and old pips."""

from setuptools import setup

setup()
