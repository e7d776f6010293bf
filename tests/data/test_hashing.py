# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_infcl.data.hashing import ID_LIMIT, mix, row_seed, stable_id, text_id


def test_values_never_change():
    # Stored ids and seeds of running experiments depend on them.
    assert text_id("a cat") == 7123888718756181351
    assert row_seed(42, 3, 1234567) == 5901578020054159510


def test_same_in_another_process_whatever_its_hash_seed():
    code = "from paddle_infcl.data.hashing import *; print(text_id('a cat'), mix(1, 2), stable_id('doc-7'))"
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.split() == [str(text_id("a cat")), str(mix(1, 2)), str(stable_id("doc-7"))]


@given(st.text())
def test_text_ids_are_63_bit_and_apart_from_small_ints(text):
    assert ID_LIMIT <= text_id(text) < 2**63
    assert text_id(text) == text_id(f" {text}\n")


@given(st.integers(0, 10**17))
def test_an_int_and_its_decimal_string_are_one_id(number):
    assert stable_id(number) == stable_id(str(number)) == number


def test_other_strings_are_hashed():
    assert stable_id("007") != 7
    assert stable_id("doc-7") == text_id("doc-7")
    assert stable_id("٣") == text_id("٣")  # an Arabic digit is a digit to str.isdigit
    assert stable_id("9" * 40) == text_id("9" * 40)


@pytest.mark.parametrize("value", [-1, ID_LIMIT, True, 1.0, None, "", "  "])
def test_what_is_no_id(value):
    with pytest.raises(ValueError):
        stable_id(value)


def test_mix_depends_on_every_argument_and_their_order():
    values = {mix(a, b, c) for a in range(9) for b in range(9) for c in range(9)}
    assert len(values) == 9**3
    assert all(0 <= value < 2**64 for value in values)
