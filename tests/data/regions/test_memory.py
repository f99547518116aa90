"""A file of any size is written and read in little memory.

FORMATS: the layout, the tests' writer if it has none of its own, a file name, and whether records have LXMERT's further arrays.
"""

import sys
from pathlib import Path

import pytest

from tests import fresh

FORMATS = {
    "tsv": ("coder_plugin.data.regions.tsv:BUA", "write_tsv", "x.tsv", False),
    "lxmert": ("coder_plugin.data.regions.tsv:LXMERT", "write_lxmert", "x_obj.tsv", True),
    "folder": ("coder_plugin.data.regions.folder:FOLDER", "write_folder", "x", True),
    "hdf5": ("coder_plugin.data.regions.hdf5:HDF5", "write_hdf5", "x.hdf5", True),
    "lmdb": ("coder_plugin.data.regions.lmdb_:LMDB", "write_lmdb", "x.lmdb", True),
    "precomp": ("coder_plugin.data.regions.precomp:PRECOMP", "", "x_precomp", False),
    "shards": ("coder_plugin.data.regions.shards:SHARDS", "", "x_shards", True),
}
NEEDS = {"hdf5": "h5py", "lmdb": "lmdb"}
MB = 1 << 20
IMAGE = 36 * 2048 * 4

# VmHWM is what ru_maxrss tells, but of this program alone: ru_maxrss begins with the size of the process that started it.
CHILD = """
import importlib, sys
import numpy as np
from tests.data.regions import layouts
from coder_plugin.data.regions.base import Record, Regions

what, target, writer, path, number, extras, hold = sys.argv[1:5] + [int(each) for each in sys.argv[5:]]
for module in ("h5py", "lmdb", "coder_plugin.data.shards"):
    try:
        importlib.import_module(module)
    except ImportError:
        pass
module, name = target.split(":")
form = getattr(importlib.import_module(module), name)


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(field))


def records():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((36, 2048), np.float32)
    boxes = np.tile(np.float32([0, 0, 10, 10]), (36, 1))
    ids, scores = np.arange(36), np.ones(36, np.float32)
    more = dict(objects_id=ids, objects_conf=scores, attrs_id=ids, attrs_conf=scores) if extras else {}
    for number_ in range(number):
        features = base.copy()
        features[0, 0] = number_
        yield Record(f"{number_:012}", Regions(features, boxes, (640.0, 480.0), extras=more), ("a", "b", "c", "d", "e"))


before = memory("VmRSS")
if what == "write":
    if writer:
        getattr(layouts, writer)(path, records())
    else:
        assert form.write(path, records()) == number
else:
    held = []
    for place, (image, regions) in enumerate(form.open(path).items()):
        assert int(image) == place == regions.features[0, 0] and regions.features.shape == (36, 2048)
        if hold:
            held.append(regions)
    assert place == number - 1
print(memory("VmHWM") - before)
"""


def grown(what: str, target: str, writer: str, path: Path, size: int, extras: bool, *, hold: bool = False) -> int:
    """MB by which a process that writes or reads ``size`` MB of features grows."""
    arguments = [what, target, writer, path, size * MB // IMAGE, int(extras), int(hold)]
    done = fresh.run(["-c", CHILD, *map(str, arguments)])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def both(name: str, folder: Path, size: int) -> tuple[int, int]:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    target, writer, file, extras = FORMATS[name]
    assert not list(folder.iterdir())
    wrote, read = (grown(what, target, writer, folder / file, size, extras) for what in ("write", "read"))
    print(f"{name}: {size} MB of features: writing grew by {wrote} MB, reading by {read} MB")
    return 0 if writer else wrote, read  # the tests' own writers hold what they like


@pytest.fixture
def folder(tmp_path):
    """Gone as soon as the test is over: pytest would keep the files of three runs."""
    import shutil

    yield tmp_path
    shutil.rmtree(tmp_path)


linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


@linux
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "lxmert"])  # read as tsv is
def test_200_mb_in_40(folder, name):
    wrote, read = both(name, folder, 200)
    assert wrote < 40 and read < 40


@linux
def test_the_measure_shows_a_file_that_is_held(folder):
    target, writer, file, extras = FORMATS["tsv"]
    grown("write", target, writer, folder / file, 60, extras)
    assert 55 < grown("read", target, writer, folder / file, 60, extras, hold=True) < 100


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_2_gb_in_300_mb(folder, name):
    wrote, read = both(name, folder, 2048)
    assert wrote < 300 and read < 300
