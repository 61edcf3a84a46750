"""Every test begins in PyNative mode, with MindSpore's settings as they are by default."""

import mindspore as ms
import mindspore.dataset as ds
import pytest
from mindspore.graph.api import _pynative_executor


@pytest.fixture(autouse=True)
def default_settings():
    yield
    # An exception inside a network leaves PyNative mode recording; the next network would be run twice.
    _pynative_executor.clear_res()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ds.config.set_fast_recovery(True)


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def mode(request):
    ms.set_context(mode=request.param)
    return request.param
