"""Random regions, and checks that every layout must pass."""

import multiprocessing
import pickle

import numpy as np
from hypothesis import strategies as st

from coder_plugin.data.regions.base import Record, RegionFormat, Regions

WIDE = [np.float16, np.float32, np.float64]


def made(count: int = 3, channels: int = 5, *, seed: int = 0, dtype=np.float32, boxes: bool = True, **more) -> Regions:
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 400, (count, 2, 2)), axis=1).reshape(count, 4).astype(np.float32)
    return Regions(
        features=rng.standard_normal((count, channels)).astype(dtype),
        boxes=corners if boxes else None,
        **{"size": (500.0, 375.0), **more},
    )


def records(number: int = 5, **options) -> list[Record]:
    return [Record(f"image {k}.jpg", made(1 + k % 4, seed=k, **options)) for k in range(number)]


@st.composite
def record_lists(draw, *, dtypes=WIDE, one_width: bool = False, extras=None, whole: bool = False, alphabet=None):
    """1 to 5 records of one dtype, of 1 to 7 regions each; in a layout that is one array, of one width and alike."""
    alphabet = alphabet or st.characters(exclude_categories=["Cs", "Cc"])
    names = draw(st.lists(st.text(alphabet, min_size=1, max_size=20), min_size=1, max_size=5, unique=True))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 1000))
    with_boxes, with_whole = draw(st.booleans()) or not whole, whole and draw(st.booleans())
    widths = st.integers(1, 6)
    channels = draw(widths)
    found = []
    for number, name in enumerate(names):
        count, width = draw(st.integers(1, 7)), channels if one_width else draw(widths)
        size = draw(st.sampled_from([(1.0, 1.0), (640.0, 480.0), (333.25, 0.1)]))
        regions = made(
            count,
            width,
            seed=seed + number,
            dtype=dtype,
            boxes=with_boxes,
            size=size,
            global_feature=np.arange(3, dtype=dtype) + number if with_whole else None,
            extras={key: make(count) for key, make in (extras or {}).items()},
        )
        found.append(Record(name, regions))
    return found


def assert_same(got: Regions, wanted: Regions, *, features=None) -> None:
    """Bit for bit, dtypes included; ``features`` is another dtype that they may be stored in."""
    pairs = [(got.features, wanted.features.astype(features or wanted.features.dtype)), (got.boxes, wanted.boxes)]
    pairs += [(got.global_feature, wanted.global_feature), *((got.extras[key], wanted.extras[key]) for key in wanted.extras)]
    for each, other in pairs:
        assert (each is None) == (other is None)
        if each is not None:
            assert (each.dtype, each.shape) == (other.dtype, other.shape) and each.tobytes() == other.tobytes()
            assert each.flags.writeable
    assert got.extras.keys() == wanted.extras.keys()
    assert tuple(got.size) == tuple(wanted.size)


def check_reading(form: RegionFormat, write, path: str, given: list[Record], *, features=None, order: bool = True) -> None:
    """What another tool writes is read bit for bit."""
    write(path, given)
    file = form.open(path)
    assert len(file) == len(given)
    assert list(file) == [each.name for each in given] if order else set(file) == {each.name for each in given}
    for name, regions, _ in given:
        assert name in file
        assert_same(file[name], regions, features=features)


def check_processes(form: RegionFormat, write, path: str) -> None:
    """Pickled, and in forked processes after the parent has read, every process reads the right images."""
    given = records(8)
    write(path, given)
    file = form.open(path)
    assert_same(file[given[0].name], given[0].regions)  # whatever is opened lazily is open now
    assert_same(pickle.loads(pickle.dumps(file))[given[3].name], given[3].regions)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_read_all, args=(file, given)) for _ in range(2)]
    for child in children:
        child.start()
    _read_all(file, given)
    for child in children:
        child.join(30)
        assert child.exitcode == 0


def _read_all(file, given) -> None:
    for _ in range(20):
        for name, regions, _ in given:
            assert_same(file[name], regions)
