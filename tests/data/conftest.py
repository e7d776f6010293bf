# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.data import tokenizers


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory):
    """A new tokenizer of a kind, as tests may change it."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return lambda kind: tokenizers.KINDS[kind](folder / kind)


@pytest.fixture(scope="session")
def bert(make_tokenizer):
    return make_tokenizer("bert")
