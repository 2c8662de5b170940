"""Tests of P/D over NIXL."""
