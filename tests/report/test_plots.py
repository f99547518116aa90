"""Figures of the analyses: which files, what they draw, several models, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.analyses import analyse
from coder_plugin.report import figures
from coder_plugin.report.figures import plot_analyses

NAMES = ["alignment", "uniformity", "recall_by_length"]


def row(seed: int, images: int = 6, texts: int = 18, **options) -> dict:
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(images, 8, generator=generator), torch.randn(texts, 8, generator=generator)
    captions = [" ".join("w" * (1 + i)) for i in range(texts)]
    return json.loads(json.dumps(analyse(image, text, torch.arange(texts) % images, captions, **options)))


def draw(folder, rows: dict) -> list:
    """The figures that `plot_analyses` makes, kept for a look."""
    kept = []
    legend = figures._legend

    def keep(figure, handles, names):
        legend(figure, handles, names)
        kept.append(figure)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(figures, "_legend", keep)
        plot_analyses(rows, folder)
    return kept


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[dict, list]:
    """Two models and their figures."""
    rows = {"a": row(0, edges=[3, 7, 40]), "b": row(1, edges=[3, 7, 40])}
    return rows, draw(tmp_path_factory.mktemp("figures"), rows)


def test_files(tmp_path) -> None:
    paths = plot_analyses({"one": row(0)}, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"{name}.png" for name in NAMES]
    assert all(path.parent == tmp_path / "new" / "folder" and path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_bars_are_the_numbers(two) -> None:
    rows, drawn = two
    for figure, part, kinds in (
        (drawn[0], "alignment", ("image_text", "text_text")),
        (drawn[1], "uniformity", ("images", "texts")),
    ):
        [axes] = figure.axes
        bars = sorted(axes.patches, key=lambda bar: bar.get_x())  # kind by kind, in each model by model
        assert [bar.get_height() for bar in bars] == [rows[name][part][kind]["mean"] for kind in kinds for name in rows]
        assert all(
            left.get_x() + left.get_width() <= right.get_x() + 1e-9 for left, right in zip(bars, bars[1:], strict=False)
        )
        assert len({bar.get_facecolor() for bar in bars}) == 2
        spreads = [bars.errorbar.lines[2][0].get_segments() for bars in axes.containers if hasattr(bars, "errorbar")]
        for name, segments in zip(rows, spreads, strict=True):
            lengths = [segment[1][1] - segment[0][1] for segment in segments]
            assert lengths == pytest.approx([2 * rows[name][part][kind]["std"] for kind in kinds])


@pytest.mark.parametrize("models", [1, 12])
def test_models_and_odd_names(tmp_path, models: int) -> None:
    """Names are run folders: dollars are no mathematics, an underscore hides nothing, and the longest still fits."""
    names = [r"_runs/$\frac$ a", "x" * 90, *(f"runs/{i}" for i in range(models))][:models]
    for figure in draw(tmp_path, {name: row(i) for i, name in enumerate(names)}):
        assert figure.axes[0].get_position().height * figure.get_figheight() > 2  # inches: the legend leaves room
        assert len(figure.legends[0].get_texts()) == models
        assert figure.legends[0].get_texts()[0].get_text().strip().removesuffix(" (by embeddings)") == r"_runs/$\frac$ a"


@pytest.mark.slow
def test_no_pyplot(tmp_path) -> None:
    """Nor matplotlib before it is needed; and files of the same names are replaced."""
    code = (
        "import sys, coder_plugin.report.eval_figures\nfrom coder_plugin.report.figures import plot_analyses\n"
        "assert not {'matplotlib', 'sklearn'} & set(sys.modules), 'imported before it is needed'\n"
        "import json\nplot_analyses({'a': json.load(open(sys.argv[1]))}, sys.argv[2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    (tmp_path / "row.json").write_text(json.dumps(row(0)))
    (tmp_path / "alignment.png").write_text("an older one")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "row.json"), str(tmp_path)], check=True, timeout=120)
    assert b"an older one" not in (tmp_path / "alignment.png").read_bytes()


def test_bad_input(tmp_path) -> None:
    with pytest.raises(CoderError, match="no model"):
        plot_analyses({}, tmp_path)
    with pytest.raises(CoderError, match="other bins"):
        plot_analyses({"a": row(0), "b": row(1, edges=[2])}, tmp_path)
