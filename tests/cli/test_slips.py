"""What people get wrong on the command line: each slip is one line that names it and says what to do, and nothing is lost."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from coder_plugin.cli import main

#: Command, words of its message. These are found before torch is imported.
LIGHT: list[tuple[str, list[str]]] = [
    ("trian", ["unknown command 'trian'", "did you mean 'train'?", "eval, compare, report, embed"]),
    ("--loss=dcl train", ["unknown option --loss", "coder-plugin train --help-all"]),
    ("train --bach-size 8", ["coder-plugin train", "unknown option --bach-size", "did you mean --batch-size?"]),
    ("train --batch_size 8", ["unknown option --batch_size", "did you mean --batch-size?"]),
    ("train --Learning_Rate 1", ["unknown option --Learning_Rate", "did you mean --lr?"]),
    ("train --max-iters 9", ["unknown option --max-iters", "did you mean --max-steps?"]),
    ("train --weight_decay 0.1", ["unknown option --weight_decay", "did you mean --wd?"]),
    ("train --output runs", ["unknown option --output", "did you mean --logs?"]),
    ("search pictures red", ["unexpected 'red'", "did you mean --text red?"]),
    ("train --device cuda", ["unknown option --device: a GPU is used where there is one", "CUDA_VISIBLE_DEVICES"]),
    ("train --beta2 0.98", ["unknown option --beta2: write --open-clip beta2=VALUE"]),
    ("train --open-clip beta3=1", ["--open-clip beta3=1: write OPTION=VALUE, with one of", "beta2, eps"]),
    ("train --open-clip beta2", ["--open-clip beta2: write OPTION=VALUE"]),
    ("train --open-clip beta2=high", ["--open-clip beta2 is 'high'; it must be a number"]),
    ("train --max-steps 0", ["--max-steps must be at least 1, got 0"]),
    ("train --nonsense", ["unknown option --nonsense", "coder-plugin train --help-all"]),
    ("train --help-al", ["did you mean --help-all?"]),
    ("train --batch-size abc", ["--batch-size: 'abc' is not a whole number", "--help-all"]),
    ("train --lr fast", ["--lr: 'fast' is not a number"]),
    ("train --lr", ["--lr: expected one argument"]),
    ("train --lr -1", ["--lr must be > 0, got -1"]),
    ("train --ema-decay 2", ["--ema-decay must be in (0, 1), got 2"]),
    ("train --precision fp23", ["did you mean 'fp32'?"]),
    ("train --precision fp8", ["--precision: 'fp8' is not allowed", "auto, fp32, amp"]),
    ("train --warmup 3 --warmup-epochs 1", ["--warmup and --warmup-epochs both set", "give one"]),
    ("train pairs.csv", ["unexpected 'pairs.csv'", "follows its option"]),
    ("train --json", ["--json prints the plan", "add --dry-run"]),
    ("train --resume latest", ["--resume latest needs --name"]),
    ("train --loss 'dcl + '", ['loss "dcl + "', "a loss or an objective is missing after '+'"]),
    ("train --loss ''", ["--loss is empty"]),
    ("train --loss '3*dlc'", ["column 3", "unknown loss or objective 'dlc'", "did you mean 'dcl'?"]),
    ("train --loss 'dcl + infonce'", ["column 7", "unknown loss or objective 'infonce'; did you mean 'clip' (InfoNCE)?"]),
    ("train --loss Info_NCE-loss", ["unknown loss or objective 'Info_NCE-loss'; did you mean 'clip' (InfoNCE)?"]),
    ("losses", ["unknown command 'losses': coder-plugin plugins losses lists them; commands: train"]),
    ("train --loss 'clip + 0.5*spread'", ["column 12", "is known in that process", "an entry point", "docs/plugins.md"]),
    ("train --loss 'dcl + + clip'", ["column 7", "expected a loss or an objective, found '+'"]),
    ("train --loss 'dcl(mu=0.1'", ["column 11", "',' or ')' is missing after '0.1'"]),
    ("train --loss 'dcl clip'", ["column 5", "expected '+', found 'clip'"]),
    (f"train --loss '{'+'.join(['clip'] * 3000)}'", ["column 500", "an expression may have at most 100 items"]),
    (f"train --loss '{'(' * 3000}clip{')' * 3000}'", ["column 1", "expected a loss or an objective, found '('"]),
    ("train --config long.json", ["column 500", "an expression may have at most 100 items"]),
    ("train --set dcl.mu", ["--set dcl.mu", "write OWNER.OPTION=VALUE, such as dcl.mu=0.07"]),
    ("train --recipe dcl", ["'dcl' is a loss, not a recipe", "use --loss dcl"]),
    ("train --recipe finetune", ["unknown recipe 'finetune'; did you mean 'finetune-clip'?"]),
    ("train --recipe codr-f30k", ["unknown recipe 'codr-f30k'", "did you mean 'coder-f30k'?"]),
    ("train --recipe coder", ["'coder' is an objective, not a recipe", "use --loss coder"]),
    ("train --recipe mine.toml", ["mine.toml", "No such file"]),
    ("train --recipe coder-f30k --dry-run", ["its region-bert reads region features", "add --train-data", "coder-tiny"]),
    ("train --config mine.json", ["--config mine.json", "No such file"]),
    ("train --config broken.json", ["--config broken.json", "line 1 column 2"]),
    ("train --config unknown.json", ["--config unknown.json", "unknown option batchsize", "did you mean batch_size?"]),
    ("train --config wrong.json", ["--epochs is 'ten'", "it must be a whole number", "wrong.json"]),
    ("train --model ViT-B32", ["unknown model 'ViT-B32'", "did you mean ViT-B-32"]),
    ("train --model mine.json", ["model configuration mine.json does not exist"]),
    ("train --train-data pairs.csv", ["--model is needed with --train-data", "such as --model ViT-B-32"]),
    ("train --dataset-type csv", ["--dataset-type csv needs --train-data"]),
    ("train --dataset-type cvs", ["--dataset-type cvs: unknown reader", "did you mean 'csv'?", "webdataset"]),
    ("train --train-data nope.csv --model coder-tiny", ["--train-data nope.csv: no such file or folder"]),
    ("train --train-data pair.csv --model coder-tiny", ["--train-data pair.csv: no such file", "did you mean 'pairs.csv'?"]),
    ("train --train-data away/x.csv --model coder-tiny", ["no such file", "there is no folder"]),
    ("train --train-data pictures --model coder-tiny", ["pictures without captions", "a .csv", ".json with --image-root"]),
    ("train --train-data notes.md --model coder-tiny", ["cannot tell what kind of data 'notes.md' is", "--dataset-type"]),
    ("train --train-data pairs.csv --val-data vall.csv --model coder-tiny", ["--val-data vall.csv: no such file"]),
    ("train --image-root picturs", ["--image-root picturs: no such file or folder", "did you mean 'pictures'?"]),
    ("train --concepts words.safetensors --loss coder", ["--concepts words.safetensors: no such file"]),
    ("train --pretrained weights.pt", ["--pretrained weights.pt: no such file"]),
    ("eval logs/run", ["logs/run: no such folder", "a run or an export", "coder-plugin train makes"]),
    ("eval picture --val-data scenes", ["picture: no such folder", "did you mean 'pictures'?"]),
    ("eval pairs.csv", ["pairs.csv is a file", "give the folder of a run or an export"]),
    ("eval pictures --zeroshot classes", ["--zeroshot classes: no such file or folder"]),
    ("index nope --data pictures --output found", ["nope: no such folder", "coder-plugin train makes"]),
    ("index pictures --data pictures", ["required: --output", "coder-plugin index --help-all"]),
    ("embed nope --data pictures --output e", ["nope: no such folder", "coder-plugin train makes"]),
    ("embed pictures --data pictures --output pairs.csv", ["--output pairs.csv is a file: name a folder"]),
    ("embed pictures --data pictures/a.png --output e", ["one picture: give the folder that it is in"]),
    ("embed pictures --data pictures/a.pgn --output e", ["no such file or folder", "did you mean 'pictures/a.png'?"]),
    ("embed pictures --data pictures --output e --max-bad-samples 3", ["must be < 1 (a fraction of all), got 3"]),
    ("embed pictures --data pictures", ["required: --output", "coder-plugin embed --help-all"]),
    ("embed --data pictures --output e", ["name the encoding model", "a run's or export's folder", "--pretrained"]),
    ("embed pictures --data pictures --output e --dtype fp16", ["--dtype: 'fp16' is not allowed", "float32, float16"]),
    ("embed pictures --data pictures --output e --rows-per-file 0", ["--rows-per-file must be at least 1, got 0"]),
    ("embed pictures --data pictures --output e --task-index 3", ["--task-index and --task-count belong together"]),
    ("embed pictures --data pictures --output e --task-index 4 --task-count 4", ["--task-index 4 of --task-count 4"]),
    ("embed pictures --data pictures --output e --columns year:int", ["the type 'int' is not one of string, int64"]),
    ("embed pictures --data pictures --output e --columns a a", ["--columns a: 'a' is named twice"]),
    ("embed pictures --data pictures --output e --tokens --what captions", ["--tokens needs the images"]),
    ("embed pictures --data pictures --output e --factory Flat", ["unknown option --factory"]),
    ("eval", ["name the model", "a run's or export's folder", "--model"]),
    ("index --data pictures --output found", ["name the encoding model", "a run's or export's folder", "--pretrained"]),
    ("search nope --text 'a dog'", ["nope: no such folder", "the folder of an index, which coder-plugin index makes"]),
    ("search pictures", ["nothing to search for", "give --text, --image or --key"]),
    ("search pictures --image nope.png", ["--image nope.png: no such file"]),
    ("search pictures --text x -k 0", ["k must be at least 1, got 0"]),
    ("search pictures --text x --reranker maxsin", ["--reranker 'maxsin' is unknown", "did you mean 'maxsim'?"]),
    ("index pictures --data pictures --output found --reranker 'a+b'", ["--reranker 'a+b'", "expected one re-ranker"]),
    ("eval pictures --reranker 'maxsim('", ["--reranker", "column 8", "is missing after '('"]),
    ("search pictures 'a red dog'", ["did you mean --text 'a red dog'?"]),
    ("serve nope", ["nope: no such folder", "the folder of an index, which coder-plugin index makes"]),
    ("serve", ["required: INDEX", "coder-plugin serve --help-all"]),
    ("serve pictures --port 65536", ["--port must be 0 to 65535, got 65536"]),
    ("serve pictures --data pairs.csv", ["--data pairs.csv is a file: give the folder that it is in"]),
    ("serve pictures --address 0.0.0.0", ["unknown option --address"]),
    ("search x --imgae y", ["coder-plugin search", "unknown option --imgae", "did you mean --image?"]),
    ("duplicates nope", ["nope: no such folder", "the folder of an index, which coder-plugin index makes"]),
    ("duplicates pictures --threshold 95", ["--threshold is a cosine, above 0 and at most 1, got 95.0"]),
    ("duplicates pictures --html no/page.html", ["--html no/page.html: the folder no does not exist"]),
    ("vectors pictures --to lancedb", ["required: --output"]),
    ("vectors pictures --to lanced --output x", ["--to lanced: it is parquet or numpy", "docs/embed.md"]),
    ("vectors nope --to numpy --output x", ["nope: no such folder", "the folder of an index, which coder-plugin index makes"]),
    ("mine --output n.tsv", ["name the model", "--model", "or give its --index"]),
    ("mine pictures", ["required: --output", "coder-plugin mine --help-all"]),
    ("mine nope --output n.tsv", ["nope: no such folder", "a run or an export"]),
    ("mine pictures --output n.tsv", ["name the training set with --data", "a run's folder names its own"]),
    ("mine --index nope --output n.tsv", ["nope: no such folder", "the folder of an index, which coder-plugin index makes"]),
    ("mine pictures --data pictures --output n.tsv", ["--data pictures", "pictures without captions"]),
    ("mine pictures --output pictures", ["--output pictures is a folder", "such as pictures/negatives.tsv"]),
    ("mine pictures --data pairs.csv --output pairs.csv", ["pairs.csv exists and is not a table of negatives", "another name"]),
    ("mine pictures --data pairs.csv --output n.tsv --html no/page.html", ["--html no/page.html: the folder no does not"]),
    ("mine pictures --output n.tsv --num-negatives 0", ["--num-negatives must be at least 1, got 0"]),
    ("mine pictures --output n.tsv --range-min 9 --range-max 10", [
        "--range-max 10 leaves 1 candidate after --range-min 9, fewer than --num-negatives 5"
    ]),
    ("mine pictures --output n.tsv --margin 0.1", ["unknown option --margin", "did you mean --relative-margin?"]),
    ("mine pictures --output n.tsv --absolute-margin nan", ["--absolute-margin must be a finite number, got nan"]),
    ("mine pictures --output n.tsv --margin-from mean", ["--margin-from: 'mean' is not allowed", "allowed: max, min"]),
    ("mine pictures --output n.tsv --max-similarity 90", ["--max-similarity is a cosine, above -1 and at most 1, got 90"]),
    ("mine pictures --output n.tsv --sampling-strategy first", ["'first' is not allowed", "top, random"]),
    ("eval run --pictures-count 0", ["--pictures-count must be at least 1, got 0"]),
    ("doctor run --samples 0", ["--samples must be at least 1, got 0"]),
    ("report nope", ["nope: no such folder", "a run, which coder-plugin train makes"]),
    ("share nope --to x", ["nope: no such folder"]),
    ("share pictures --to x --repo a/b", ["give one destination"]),
    ("regions extract pictures out --batch-size 0", ["--batch-size must be at least 1, got 0"]),
    ("share pictures", ["give one destination: --to FOLDER or --repo OWNER/NAME"]),
    ("concepts --output a.safetensors", ["required: --vectors"]),
    ("concepts --output a.safetensors --vectors glove.txt", ["--vectors glove.txt: no such file"]),
    ("concepts --output a.safetensors --vectors none --max-captions 0", ["--max-captions must be at least 1, got 0"]),
    ("regions", ["required: extract|convert"]),
    ("regions extrat pictures out", ["unknown command 'extrat'", "did you mean 'extract'?"]),
    ("regions extract nope out", ["IMAGES nope: no such file or folder"]),
    ("regions convert nope.tsv out", ["SOURCE nope.tsv: no such file or folder"]),
    ("recipes codr-clip", ["unknown recipe 'codr-clip'", "did you mean 'coder-clip'?"]),
    ("plugins lossses", ["unknown plugin group: 'lossses'", "did you mean 'losses'?"]),
    ("plugins --nonsense", ["coder-plugin plugins", "unknown option --nonsense"]),
    ("doctor --strct", ["did you mean --strict?"]),
]
#: These need the data, the terms or a model.
HEAVY: list[tuple[str, list[str]]] = [
    ("train --loss='-1*dcl'", ["column 1", "a weight must be > 0", "leave the term out"]),
    ("train --loss 'dcl(my=1)'", ["column 5", "'dcl' has no option 'my'", "it has: mu"]),
    ("train --loss 'dcl(mu=big)'", ["column 5", "option mu=big must be float"]),
    ("train --loss coder-f30k", ["is a recipe", "use --recipe coder-f30k"]),
    ("train --set dlc.mu=1", ["option 'dlc.mu'", "no term and no head 'dlc'", "known: "]),
    ("train --batch-size 7000", ["--batch-size 7000 is larger than the data (6000 samples)", "a smaller --batch-size"]),
    ("train --lock-image --open-clip lock_image_unlocked_groups=1", ["this tower of coder-tiny can only be locked as a whole"]),
    ("train --report-to tensorbord", ["unknown tracker tensorbord"]),
    ("train --loss triplet --concepts pairs.csv", ["--concepts: no term of --loss", "reads concepts"]),
    ("train --train-data none-{0..1}.tar --model coder-tiny", ["none-0.tar"]),
    ("train --train-data other.csv --model coder-tiny", [
        "other.csv: no column 'filepath' for the pictures (--csv-img-key) and 'title' for the captions (--csv-caption-key)",
        "separated by ',' (--csv-separator), are: 'image', 'caption'",
    ]),
    ("train --train-data other.csv --csv-img-key image --model coder-tiny", ["no column 'title' for the captions"]),
    ("train --train-data pairs.csv --csv-separator , --model coder-tiny", ["separated by ','", "are: 'filepath\\ttitle'"]),
    ("train --train-data pairs.csv --csv-separator ;; --model coder-tiny", ["--csv-separator is ';;'", "one character"]),
    ("train --train-data latin.csv --model coder-tiny", ["line 3, byte 17 (0xe9) is not UTF-8", "iconv -f latin1 -t utf-8"]),
    ("train --train-data utf16.csv --model coder-tiny", ["line 1, byte 1 (0xff) is not UTF-8", "iconv -f utf-16 -t utf-8"]),
    ("train --train-data empty.csv --model coder-tiny", ["empty.csv: no column 'filepath'", "none: its first line is empty"]),
    ("train --train-data header.csv --model coder-tiny", ["header.csv", "no images"]),
    ("train --train-data broken.json --model coder-tiny", ["broken.json"]),
    ("train --train-data pairs.csv --model coder-tiny", ["--batch-size 64 is larger than the data (2 samples)"]),
    ("train --train-data pairs.csv --dataset-type coco --model coder-tiny", ["pairs.csv"]),
    ("train --pretrained openai", ["--pretrained 'openai' is neither a file nor a tag of coder-tiny"]),
    ("train --model ViT-B-32 --pretrained laion2b_s34b_b79k", [
        "its weights 'laion2b_s34b_b79k' must be downloaded",
        "the Hugging Face Hub cannot be reached", "hf download laion/CLIP-ViT-B-32-laion2B-s34B-b79K --local-dir FOLDER",
        "--pretrained FILE",
    ]),
    ("embed --model ViT-B-32 --pretrained openai --data pictures --output e", [
        "hf download timm/vit_base_patch32_clip_224.openai --local-dir FOLDER",
    ]),
    ("index --model coder-tiny --data pictures --output i --factory Flt", ["FAISS knows no index factory 'Flt'; use Flat"]),
    ("eval hf-hub:owner/name", ["owner/name: not in the cache", "name a folder instead", "hf download"]),
    ("mine pictures --data pairs.csv --output n.tsv", ["pictures is neither an export nor a run with one in export/best"]),
    ("mine --index pictures --output n.tsv", ["pictures is not an index: it has no index.json", "coder-plugin index makes"]),
    ("vectors pictures --to numpy --output x", ["pictures holds no embeddings"]),
    ("embed pictures --data pictures --output e --columns x", ["--columns x: pictures is a folder of pictures"]),
    ("embed pictures --data pairs.csv --output e --columns x", ["no column 'x' (--columns)", "'filepath', 'title'"]),
    ("embed pictures --data pairs.csv --output e --columns key", ["column 'key': the file has a column of that name"]),
    ("embed pictures --data scenes --output e --columns x", ["scenes is read by 'scenes', which keeps no further columns"]),
    ("search pictures --text x", ["pictures is not an index: it has no index.json", "which coder-plugin index makes"]),
    ("serve pictures --port 0", ["pictures is not an index: it has no index.json", "coder-plugin index makes"]),
]  # fmt: skip
SLIPS = {command: parts for command, parts in [*LIGHT, *HEAVY]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slips")
    (folder / "pictures").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(folder / "pictures" / f"{name}.png")
    rows = "pictures/a.png\ta dog\npictures/b.png\ta cat\n"
    (folder / "pairs.csv").write_text(f"filepath\ttitle\n{rows}")
    (folder / "other.csv").write_text(f"image,caption\n{rows}".replace("\t", ","))
    (folder / "latin.csv").write_bytes("filepath\ttitle\na.png\ta dog\nb.png\ta blue café\n".encode("latin1"))
    (folder / "utf16.csv").write_bytes(f"filepath\ttitle\n{rows}".encode("utf-16"))
    (folder / "header.csv").write_text("filepath\ttitle\n")
    (folder / "empty.csv").touch()
    (folder / "notes.md").write_text("notes")
    (folder / "broken.json").write_text("{")
    (folder / "unknown.json").write_text(json.dumps({"batchsize": 3}))
    (folder / "long.json").write_text(json.dumps({"loss": "+".join(["clip"] * 3000)}))
    (folder / "wrong.json").write_text(json.dumps({"epochs": "ten"}))
    return folder


def content(folder: Path) -> dict[str, object]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def run(command: str) -> int:
    import shlex

    try:
        return main(shlex.split(command))
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code


@pytest.mark.parametrize("command", SLIPS)
def test_a_slip_is_one_line_and_loses_nothing(command, folder, monkeypatch, capsys, caplog) -> None:
    monkeypatch.chdir(folder)
    before = content(folder)
    assert run(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("coder-plugin") and ": error: " in error and error.count("\n") == 1 and len(error) < 1000, error
    assert "Traceback" not in error
    for part in SLIPS[command]:
        assert part in error, (part, error)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert content(folder) == before


def test_without_a_command_the_help_is_printed(capsys) -> None:
    assert main([]) == 0
    assert "usage: coder-plugin" in (printed := capsys.readouterr()).out and not printed.err
    groups = re.findall(r"^(\w+):\n((?:  .*\n)+)", printed.out, flags=re.M)
    listed = {title: re.findall(r"^  (\w+)", text, flags=re.M) for title, text in groups}
    assert "positional arguments" not in printed.out
    assert [*listed] == ["options", "train", "measure", "search", "share", "inspect"]
    assert listed["share"] == ["share", "vectors"] and sorted(sum([*listed.values()], [])) == sorted(COMMANDS)
    assert "\n  coder-plugin train --name scenes\n" in printed.out


def test_the_public_names_are_listed() -> None:
    import coder_plugin

    assert set(coder_plugin.__all__) <= set(dir(coder_plugin)) and "__version__" in dir(coder_plugin)


NO_TORCH = """
import contextlib, functools, io, json, shlex, sys
from coder_plugin import cli
cli.build_parser = functools.cache(cli.build_parser)
slow = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(shlex.split(command))
        except SystemExit:
            pass
    heavy = {name for name in ("torch", "numpy", "open_clip", "transformers", "PIL") if name in sys.modules}
    if heavy:
        slow.append([command, sorted(heavy)])
        break
print(json.dumps(slow))
"""
COMMANDS = (
    "train|compare|eval|report|embed|index|search|serve|duplicates|vectors|mine|concepts|regions|recipes|share|plugins|doctor".split("|")
)
HELP = [f"{command} --help" for command in ("", *COMMANDS, "regions extract", "regions convert")]


def test_help_and_arguments_are_answered_without_torch(folder: Path) -> None:
    commands = [*HELP, "train --help-all", "plugins", "recipes", "recipes coder-clip", *(command for command, _ in LIGHT[::6])]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, json.dumps(commands)], capture_output=True, text=True, cwd=folder, check=True
    )
    assert json.loads(done.stdout) == []


def test_half_a_second_of_cpu_is_enough(folder: Path) -> None:
    code = (
        "import resource, sys; from coder_plugin.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF); print('cpu', used.ru_utime + used.ru_stime)"
    )
    command, seconds = [sys.executable, "-c", code, "train", "--train-data", "nope.csv"], []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
        seconds.append(float(done.stdout.split()[-1]))
    assert min(seconds) < 0.5
