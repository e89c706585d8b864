"""One clinic a module where tests do not change what others see; a fresh one where they do."""

import pytest

from tests.gateway import clinic as made


@pytest.fixture
def clinic(tmp_path):
    found = made.opened(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    found = made.opened(tmp_path_factory.mktemp("clinic"))
    yield found
    found.close()
