"""Tests that an implementation refuses for float64 run in float32."""

from correctness.support.exact import pytest_pyfunc_call as pytest_pyfunc_call
