"""Operators: their kind, bytes and floating-point operations.  Knows no device."""
