"""What tests of several parts share."""

import os

import pytest


@pytest.fixture
def no_flush(monkeypatch):
    """Do not wait for the disk where no power fails; the order of writes stays as it is."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
