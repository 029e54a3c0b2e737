import subprocess
import sys

import pytest

import rmd_plugin


def test_importing_the_package_does_not_import_torch():
    code = "import sys, rmd_plugin; dir(rmd_plugin); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", rmd_plugin.__all__)
def test_every_public_name_resolves(name):
    assert getattr(rmd_plugin, name) is not None
    assert name in dir(rmd_plugin)


def test_an_unknown_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'RDM'\. Public names: .*RMD"):
        _ = rmd_plugin.RDM
