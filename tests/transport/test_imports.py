import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE


@pytest.mark.real
def test_the_package_is_imported_without_nixl() -> None:
    modules = "kvd.transport.nixl.transport, tests.support.fake_transport, tests.conformance.contract"
    code = f"import sys, {modules}; assert 'nixl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
