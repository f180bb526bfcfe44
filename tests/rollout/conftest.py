"""Folders in memory, as for the tests of the MES link: no test waits for a busy disk."""

from tests.mes.conftest import tmp_path

__all__ = ["tmp_path"]
