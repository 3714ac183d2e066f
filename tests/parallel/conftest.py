"""What the tests of many processes share."""

from tests.train.conftest import no_flush as no_flush
